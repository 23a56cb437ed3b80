"""The recursive two-sided sweep: everything outside b×b tiles is matrix products, mn(m+n) flops in all.

Notation (solver.md, sections 1 and 3): E = Ŵ − W, P = E U_in, η = U_outᵀ P, and the value that entry (i, j) is
rounded from is W[i,j] − Σ_{k<i} U_out[k,i] P[k,j] − (P[i,j] without E[i,j]).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid
from bakron.core.linalg import padded
from bakron.core.parallel import Team
from bakron.core.parallel import team as whole_team
from bakron.core.wavefront import TILE as WAVEFRONT_TILE
from bakron.core.wavefront import WavefrontKernel, sweep_wavefront

TILE = 128  # tile edge; measured best of 64 … 256 on a CPU
ROW_TILE_ONE_SIDED = 512  # rows do not interact when H_out = I: taller tiles, as many as a cache holds


@dataclass
class Sweep:
    """The matrices of one sweep, all in its dtype and (m, n) unless noted; the kernel and the recursion fill them.

    W: weight; the same memory as E, whose entries take its place.  T: W − Σ_{k<i} U_out[k,i] P[k,j] over the rows outside the current tile that are done.
    P: E U_in over the columns that are done.  E: Ŵ − W.  codes: int16.
    U_out (m, m), U_in (n, n): unit upper triangular, or None for the identity.
    """

    W: Tensor
    T: Tensor
    P: Tensor
    E: Tensor
    codes: Tensor
    U_out: Tensor | None
    U_in: Tensor | None
    grid: ScalarGrid
    scratch: Any = None  # whatever a kernel keeps between tiles


TileKernel = Callable[[Sweep, int, int, int, int], None]
"""``kernel(sweep, r0, r1, c0, c1)`` rounds one tile: reads T, W and P, writes E, codes and the finished P.

An entry of W is to be read before that of E is written."""

Kernel = TileKernel | WavefrontKernel
"""What rounds inside tiles, and with it the order of the tiles: the recursion below, or ``core.wavefront``."""


def sweep(
    W: Tensor,
    grid: ScalarGrid,
    U_in: Tensor | None,
    U_out: Tensor | None,
    kernel: Kernel,
    tile: int | None = None,
) -> Tensor:
    """Round every entry of ``W`` (m, n) on the frozen ``grid`` in the product order; returns int16 codes (m, n).

    One code path for round-to-nearest (both None), GPTQ (U_out None) and BaKron. tile: edge of a tile, None for what
    suits the kernel. The result is that of the entry-by-entry definition for every tile size, up to rounding in the
    dtype of W.
    """
    if isinstance(kernel, WavefrontKernel):
        return sweep_wavefront(W, grid, U_in, U_out, kernel, tile or WAVEFRONT_TILE)
    tile = tile or TILE
    m, n = W.shape
    dtype, device = W.dtype, W.device
    E, T = padded(m, n, dtype, device).copy_(W), padded(m, n, dtype, device).copy_(W)
    del W  # before more is taken: its caller may have kept no reference either
    state = Sweep(
        W=E,
        T=T,
        P=padded(m, n, dtype, device).zero_(),
        E=E,
        codes=torch.empty(m, n, dtype=torch.int16, device=device),
        U_out=None if U_out is None else U_out.to(dtype),
        U_in=None if U_in is None else U_in.to(dtype),
        grid=grid.to(dtype),
    )
    shape = (ROW_TILE_ONE_SIDED if U_out is None else tile, tile)
    if m and n:
        with whole_team() as team:
            _Recursion(state, kernel, shape).solve(team, 0, m, 0, n)
    return state.codes


@dataclass(frozen=True)
class _Recursion:
    """Splits a sweep down to tiles of at most ``tile`` (rows, columns)."""

    s: Sweep
    kernel: TileKernel
    tile: tuple[int, int]

    def solve(self, team: Team, r0: int, r1: int, c0: int, c1: int) -> None:
        """Solve rows r0:r1, columns c0:c1: a tile by the kernel, else quarters with products between them.

        The two quarters beside the first one wait for it alone, so they are solved at the same time.
        """
        r, c = _middle(r0, r1, self.tile[0]), _middle(c0, c1, self.tile[1])
        if (r, c) == (r1, c1):
            return self.kernel(self.s, r0, r1, c0, c1)
        self.solve(team, r0, r, c0, c)
        self.carry_down(team, r0, r, r1, c0, c)
        self.carry_right(team, r0, r, c0, c, c1)
        if r == r1:
            return self.solve(team, r0, r1, c, c1)
        if c == c1:
            return self.solve(team, r, r1, c0, c1)
        team.both(lambda half: self.solve(half, r0, r, c, c1), lambda half: self.solve(half, r, r1, c0, c))
        self.carry_down(team, r0, r, r1, c, c1)
        self.carry_right(team, r, r1, c0, c, c1)
        return self.solve(team, r, r1, c, c1)

    def carry_down(self, team: Team, r0: int, r: int, r1: int, c0: int, c1: int) -> None:
        """Tell rows r:r1 of what was rounded in rows r0:r."""
        s = self.s
        if s.U_out is not None and r < r1:
            team.add_product_(s.T[r:r1, c0:c1], s.U_out[r0:r, r:r1].T, s.P[r0:r, c0:c1], alpha=-1)

    def carry_right(self, team: Team, r0: int, r1: int, c0: int, c: int, c1: int) -> None:
        """Tell columns c:c1 of what was rounded in columns c0:c."""
        s = self.s
        if s.U_in is not None and c < c1:
            team.add_product_(s.P[r0:r1, c:c1], s.E[r0:r1, c0:c], s.U_in[c0:c, c:c1])


def _middle(start: int, end: int, tile: int) -> int:
    """A middle of [start, end) at a whole number of tiles from start; ``end`` when it is one tile."""
    tiles = -(-(end - start) // tile)
    return min(start + (tiles + 1) // 2 * tile, end)
