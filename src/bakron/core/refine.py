"""Coordinate descent after the sweep: scales and single codes move while that lowers the two-sided loss that it minimised.

Notation (solver.md, sections 1 and 5): E = Ŵ − W and f = tr(H_out E H_in Eᵀ), both factors damped. Moving the value of
entry (i, j) by δ changes f by 2δ·g + δ²·c, with g = (H_out E H_in)[i,j] and c = H_out[i,i]·H_in[j,j], so that the best
value of that entry, all others fixed, is Ŵ[i,j] − g/c, and the best grid value the one nearest to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid
from bakron.core.linalg import damped, shrink_to_diagonal
from bakron.core.refit import refit_scales
from bakron.core.solution import Solution
from bakron.errors import ConfigError

PANEL = 64  # columns whose gradients are computed together
# level units by which a move must be better, so that rounding errors cannot keep codes moving
MARGIN = {torch.float32: 1e-4, torch.float64: 1e-9}


@dataclass
class Panel:
    """Some b columns of a descent; everything is transposed, so that a column of the weight is contiguous.

    codes: (b, m) int16, E: (b, m) Ŵ − W, and G: (b, m) the gradient H_in E H_out; a kernel keeps all three up to date.
    H_in: (b, b) block of the panel's columns.  H_out: (m, m), or None for the identity.
    scale: (n_groups, m).  group: (b,).  levels, uniform: those of the grid.  margin: see MARGIN.
    """

    codes: Tensor
    E: Tensor
    G: Tensor
    H_in: Tensor
    H_out: Tensor | None
    scale: Tensor
    group: Tensor
    levels: Tensor
    uniform: bool
    margin: float


PanelKernel = Callable[[Panel], int]
"""``kernel(panel)`` visits column after column, in each row after row, moves what lowers f, returns the moves."""


Storable = Callable[[Tensor], Tensor]
"""The nearest scales, of the same signs, that a checkpoint can hold."""


def descend(
    W: Tensor,
    grid: ScalarGrid,
    codes: Tensor,
    H_in: Tensor | None,
    H_out: Tensor | None,
    sweeps: int,
    kernel: PanelKernel,
    panel: int = PANEL,
    storable: Storable | None = None,
) -> tuple[ScalarGrid, Tensor, int]:
    """Cyclic coordinate descent from ``codes`` (m, n): at most ``sweeps`` passes; with ``storable``, scales are refitted
    before each of them, else the ``grid`` is frozen.

    H_in (n, n), H_out (m, m): symmetric PSD, as they are to be minimised; None is the identity. Returns the grid and int16
    codes whose f is not above that of ``codes`` on ``grid``, compared in float64, and how many moves were made (0 when
    nothing that was found lowers f). It stops once a pass moves nothing. The codes are those of visiting one entry after
    the other, column by column, for every panel width, up to rounding in the dtype of W. A pass costs 2mn(m+n) flops of
    matrix products, and a refit twice that.
    """
    m, n = W.shape
    start, grid = grid, grid.to(W.dtype)
    fitted = grid
    H_in = None if H_in is None else H_in.to(W.dtype).contiguous()
    H_out = None if H_out is None else H_out.to(W.dtype).contiguous()
    moving = codes.T.contiguous().clone()
    total = 0
    for _ in range(sweeps if m and n else 0):
        last = grid
        if storable is not None:
            grid = _refitted(W, grid, moving.T, H_in, H_out, storable)
        E = (grid.values(moving.T) - W).T.contiguous()
        scale = grid.scale.T.contiguous()
        moved = 0
        for j in range(0, n, panel):
            c = slice(j, min(j + panel, n))
            if H_in is None:
                G, block = E[c].clone(), torch.eye(len(E[c]), dtype=W.dtype, device=W.device)
            else:
                G, block = H_in[c] @ E, H_in[c, c].contiguous()
            moved += kernel(
                Panel(
                    codes=moving[c],
                    E=E[c],
                    G=G if H_out is None else G @ H_out,
                    H_in=block,
                    H_out=H_out,
                    scale=scale,
                    group=grid.group[c],
                    levels=grid.levels,
                    uniform=grid.uniform,
                    margin=MARGIN[W.dtype],
                )
            )
        total += moved
        if not moved and torch.equal(grid.scale, last.scale):
            break
    found = moving.T.contiguous()
    if (total or grid is not fitted) and _change(W, (start, codes), (grid, found), H_in, H_out) < 0:
        return start if grid is fitted else grid, found, total
    return start, codes, 0


def _refitted(
    W: Tensor, grid: ScalarGrid, codes: Tensor, H_in: Tensor | None, H_out: Tensor | None, storable: Storable
) -> ScalarGrid:
    """The grid, which has no offset, with refitted scales; one that would vanish or change its sign stays."""
    scale = refit_scales(W, grid, codes, H_in, H_out)
    scale = torch.where(scale * grid.scale > 0, storable(scale), grid.scale)
    return ScalarGrid(grid.levels, scale, grid.zero, grid.group)


Rounded = tuple[ScalarGrid, Tensor]
"""A grid, and codes on it."""


def _change(W: Tensor, before: Rounded, after: Rounded, H_in: Tensor | None, H_out: Tensor | None) -> float:
    """f(after) − f(before) in float64, as tr(H_out Δ H_in (2E + Δ)ᵀ) with Δ the change of E: no difference of sums."""
    start, end = (grid.to(torch.float64).values(codes) for grid, codes in (before, after))
    step = end - start
    right = 2 * (start - W.to(torch.float64)) + step
    left = step if H_out is None else H_out.to(torch.float64) @ step
    right = right if H_in is None else right @ H_in.to(torch.float64)
    return float((left * right).sum())


def refined(
    solution: Solution, sweeps: int, kernel: PanelKernel, storable: Storable | None = None
) -> Solution:
    """``solution`` with its codes, and with ``storable`` its scales, moved by at most ``sweeps`` passes of coordinate descent.

    It descends the damped and shrunk metric that the sweep rounded in, never raising it; certificate and damping stay
    those of the sweep. Raises ConfigError when ``sweeps`` is negative.
    """
    if sweeps < 0:
        raise ConfigError(f"sweeps: {sweeps} is negative; 0 leaves the codes as they are.")
    problem = solution.problem
    H_in, H_out = problem.H_in, problem.H_out
    if H_out is not None:
        H_out = damped(shrink_to_diagonal(H_out, problem.shrink_out), solution.damping[1])
    if H_in is not None:
        H_in = damped(H_in, solution.damping[0])
    W = problem.weight.detach()
    W = W if W.dtype == torch.float64 else W.to(torch.float32)
    grid, codes, _ = descend(W, solution.grid, solution.codes, H_in, H_out, sweeps, kernel, storable=storable)
    if codes is solution.codes:
        return solution
    return dataclasses.replace(
        solution, grid=grid, codes=codes, weight=grid.values(codes), clip_rate=_clip_rate(grid, codes)
    )


def _clip_rate(grid: ScalarGrid, codes: Tensor) -> float:
    index = codes - grid.first_code
    return float(((index == 0) | (index == len(grid.levels) - 1)).double().mean())
