"""Grids that round runs of eight columns of a row together, to points of the E8 lattice: grid, kernel, reference.

The sweep is that of scalar grids with H_in = U D Uᵀ factored in 8×8 blocks: U is then unit *block* upper triangular,
its diagonal blocks identities, and the feedback inside a run is left to its joint rounding (solver.md, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement
from math import isqrt
from typing import ClassVar, cast

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid
from bakron.core.solver import Sweep

RUN = 8


@dataclass(frozen=True)
class VectorGrid(ScalarGrid):
    """Values ``scale·codes``: the codes of a run of eight columns are twice a point of E8 of squared norm ≤ radius.

    E8 is all x with whole or all half-whole entries and an even sum. levels are the whole numbers that occur as codes,
    zero is 0, and a run has one scale (m, n_groups), half of the lattice's unit.
    """

    run: ClassVar[int] = RUN
    radius: int = 10

    def permute(self, rows: Tensor, columns: Tensor) -> VectorGrid:
        """The same grid for the matrix ``W[rows][:, columns]``; ``columns`` must keep runs together."""
        return VectorGrid(
            self.levels, self.scale[rows], self.zero[rows], self.group[columns], radius=self.radius
        )

    def to(self, dtype: torch.dtype) -> VectorGrid:
        """The grid with levels, scales and zeros in ``dtype``."""
        return VectorGrid(
            self.levels.to(dtype), self.scale.to(dtype), self.zero.to(dtype), self.group, radius=self.radius
        )

    def nearest(self, values: Tensor) -> Tensor:
        """The (m, n) int16 codes of the points nearest to the runs of ``values``."""
        points = self._units(values).reshape(-1, RUN)
        return nearest_codes(points, self.radius)[0].view(values.shape)

    def excess(self, target: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """By how much farther ``target`` (m, n) is from its code's point than from the nearest one, in lattice units.

        Returns (excess, clipped), the same for all columns of a run; a run is clipped when its target's nearest point of
        the whole lattice is outside the radius.
        """
        points = self._units(target).reshape(-1, RUN)
        best, clipped = nearest_codes(points, self.radius)
        chosen, least = (
            (points - c.to(points.dtype).view(-1, RUN) / 2).square().sum(1).sqrt() for c in (codes, best)
        )
        shape = target.shape
        return (chosen - least).repeat_interleave(RUN).view(shape), clipped.repeat_interleave(RUN).view(shape)

    def _units(self, values: Tensor) -> Tensor:
        return values / (2 * self.scale[:, self.group])


def nearest_codes(points: Tensor, radius: int) -> tuple[Tensor, Tensor]:
    """Twice the points of E8 of squared norm ≤ radius nearest to ``points`` (k, 8): int16 (k, 8).

    Also (k,) whether the nearest point of the whole lattice is outside.
    """
    doubled = (2 * nearest_e8(points)).to(torch.int16)
    outside = doubled.to(torch.int32).square().sum(1) > 4 * radius
    if bool(outside.any()):
        doubled[outside] = _nearest_inside(points[outside], radius)
    return doubled, outside


def _nearest_inside(x: Tensor, radius: int) -> Tensor:
    """Twice the nearest to ``x`` (k, 8) of all points in the ball, by comparing one point of every shape.

    Permutations keep E8, and so do changes of sign, in even number if entries are half-whole. So the best point of a
    shape has the order of magnitudes and the signs of x; where their number is wrong, that of the least entry turns.
    """
    shapes = _shapes(radius).to(x.device)
    magnitude, place = x.abs().sort(dim=1, descending=True, stable=True)
    negative = (x < 0).sum(1, keepdim=True)
    half = shapes[:, 0] % 2 == 1
    turn = half & ((shapes.sum(1) - 2 * negative) % 4 != 0)
    centres = shapes.to(x.dtype) / 2
    gain = magnitude @ centres.T - centres.square().sum(1) / 2 - turn * magnitude[:, -1:]
    best = gain.argmax(1)
    found = shapes[best]
    found[:, -1] *= torch.where(turn.gather(1, best[:, None])[:, 0], -1, 1)
    found = torch.empty_like(found).scatter_(1, place, found)
    return torch.where(x < 0, -found, found).to(torch.int16)


@lru_cache
def _shapes(radius: int) -> Tensor:
    """Twice the magnitudes, falling, of the points of E8 of squared norm ≤ radius: int64 (shapes, 8)."""
    limit = 4 * radius
    falling = [
        shape
        for parity in (0, 1)
        for shape in combinations_with_replacement(range(parity + 2 * (isqrt(limit) // 2), -1, -2), RUN)
        if sum(x * x for x in shape) <= limit and (parity or sum(shape) % 4 == 0)
    ]
    return torch.tensor(falling)


def nearest_e8(x: Tensor) -> Tensor:
    """The point of E8 nearest to each of ``x`` (k, 8): the better of D8 and D8 + ½ (Conway & Sloane, 1982)."""
    whole, half = _nearest_d8(x), _nearest_d8(x - 0.5) + 0.5
    closer = (x - half).square().sum(1) < (x - whole).square().sum(1)
    return torch.where(closer[:, None], half, whole)


def _nearest_d8(x: Tensor) -> Tensor:
    """The nearest whole vector of even sum: where the sum is odd, the worst entry is rounded the other way."""
    rounded = x.round()
    missed = x - rounded
    worst = missed.abs().argmax(1, keepdim=True)
    other = torch.where(missed.gather(1, worst) < 0, -1.0, 1.0).to(x.dtype)
    odd = (rounded.sum(1, keepdim=True) % 2).abs()
    return rounded.scatter_add(1, worst, other * odd)


def block_unit(U: Tensor, run: int) -> Tensor:
    """The unit block upper triangular factor U diag(U_BB)⁻¹ of a unit upper triangular U (n, n); n must be whole runs."""
    blocks = [
        torch.linalg.solve_triangular(
            U[start : start + run, start : start + run], U[:, start : start + run], upper=True, left=False
        )
        for start in range(0, len(U), run)
    ]
    return torch.cat(blocks, 1) if blocks else U


def round_vectors(s: Sweep, r0: int, r1: int, c0: int, c1: int) -> None:
    """Tile kernel for vector grids, in plain torch for any device: rounds a tile by anti-diagonals of runs."""
    rows, columns = r1 - r0, (c1 - c0) // RUN
    W, T, P = (x[r0:r1, c0:c1] for x in (s.W, s.T, s.P))
    E, done = torch.zeros_like(P), torch.zeros_like(P)  # E and P of the runs that are rounded, zero elsewhere
    U_out = None if s.U_out is None else s.U_out[r0:r1, r0:r1].triu(1)
    U_in = None if s.U_in is None else s.U_in[c0:c1, c0:c1]
    scale = s.grid.scale[r0:r1][:, s.grid.group[c0:c1]]
    one_group = torch.zeros(RUN, dtype=torch.int64, device=W.device)
    radius = cast(VectorGrid, s.grid).radius
    for diagonal in range(rows + columns - 1):
        i = torch.arange(max(0, diagonal - columns + 1), min(rows, diagonal + 1), device=W.device)[:, None]
        j = (diagonal - i) * RUN + torch.arange(RUN, device=W.device)
        left = P[i, j]
        if U_in is not None:  # E of this run and later ones is still zero
            left = left + torch.einsum("kc,ckj->kj", E[i[:, 0]], U_in[:, j])
        target = T[i, j] - left
        if U_out is not None:
            target = target - torch.einsum("rk,rkj->kj", U_out[:, i[:, 0]], done[:, j])
        cell = scale[i, j[:, :1]]
        cells = VectorGrid(s.grid.levels, cell, torch.zeros_like(cell), one_group, radius=radius)
        codes = cells.nearest(target)
        error = cells.values(codes) - W[i, j]
        s.codes[r0 + i, c0 + j] = codes
        E[i, j] = error
        done[i, j] = left + error
    P.copy_(done)
    s.E[r0:r1, c0:c1] = E


def round_runs_in_order(
    W: Tensor,
    grid: VectorGrid,
    U_in: Tensor | None,
    U_out: Tensor | None,
    order: Iterable[tuple[int, int]] | None = None,
) -> Tensor:
    """The slow oracle: int16 codes (m, n), run by run from the definition; ``order`` lists (row, run), row-major if None.

    U_in is unit block upper triangular (``block_unit``).
    """
    m, n = W.shape
    U_in = torch.eye(n, dtype=W.dtype) if U_in is None else U_in.to(W.dtype)
    U_out = torch.eye(m, dtype=W.dtype) if U_out is None else U_out.to(W.dtype)
    grid = grid.to(W.dtype)
    E = torch.zeros_like(W)
    codes = torch.zeros(m, n, dtype=torch.int16)
    for i, b in order or ((i, b) for i in range(m) for b in range(n // RUN)):
        columns = torch.arange(b * RUN, (b + 1) * RUN)
        end = (b + 1) * RUN
        correction = U_out[: i + 1, i] @ E[: i + 1, :end] @ U_in[:end, columns]  # E of this run is still zero
        cell = grid.permute(torch.tensor([i]), columns)
        codes[i, columns] = cell.nearest((W[i, columns] - correction)[None])[0]
        E[i, columns] = cell.values(codes[i, columns][None])[0] - W[i, columns]
    return codes
