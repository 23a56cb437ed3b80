"""The recursive two-sided sweep: everything outside b×b tiles is matrix products, mn(m+n) flops in all.

Notation (solver.md, sections 1 and 3): E = Ŵ − W, P = E U_in, η = U_outᵀ P, and the value that entry (i, j) is
rounded from is W[i,j] − Σ_{k<i} U_out[k,i] P[k,j] − (P[i,j] without E[i,j]).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid
from bakron.core.wavefront import WavefrontKernel, sweep_wavefront

TILE = 64  # tile edge; measured best of 32, 64, 128 on CPUs
ROW_TILE_ONE_SIDED = 512  # rows do not interact when H_out = I: taller tiles, as many as a cache holds


@dataclass
class Sweep:
    """The matrices of one sweep, all in its dtype and (m, n) unless noted; the kernel and the recursion fill them.

    W: weight.  T: W − Σ_{k<i} U_out[k,i] P[k,j] over the rows outside the current tile that are done.
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


TileKernel = Callable[[Sweep, int, int, int, int], None]
"""``kernel(sweep, r0, r1, c0, c1)`` rounds one tile: reads T, W and P, writes E, codes and the finished P."""

Kernel = TileKernel | WavefrontKernel
"""What rounds inside tiles, and with it the order of the tiles: the recursion below, or ``core.wavefront``."""


def sweep(
    W: Tensor,
    grid: ScalarGrid,
    U_in: Tensor | None,
    U_out: Tensor | None,
    kernel: Kernel,
    tile: int = TILE,
) -> Tensor:
    """Round every entry of ``W`` (m, n) on the frozen ``grid`` in the product order; returns int16 codes (m, n).

    One code path for round-to-nearest (both None), GPTQ (U_out None) and BaKron. The result is that of the
    entry-by-entry definition for every tile size, up to rounding in the dtype of W.
    """
    if isinstance(kernel, WavefrontKernel):
        return sweep_wavefront(W, grid, U_in, U_out, kernel, tile)
    m, n = W.shape
    state = Sweep(
        W=W.contiguous(),
        T=W.clone(memory_format=torch.contiguous_format),
        P=torch.zeros_like(W, memory_format=torch.contiguous_format),
        E=torch.zeros_like(W, memory_format=torch.contiguous_format),
        codes=torch.zeros(m, n, dtype=torch.int16, device=W.device),
        U_out=None if U_out is None else U_out.to(W.dtype).contiguous(),
        U_in=None if U_in is None else U_in.to(W.dtype).contiguous(),
        grid=grid.to(W.dtype),
    )
    row_tile = ROW_TILE_ONE_SIDED if U_out is None else tile
    if m and n:
        _solve(state, 0, m, 0, n, row_tile, tile, kernel)
    return state.codes


def _solve(
    s: Sweep, r0: int, r1: int, c0: int, c1: int, row_tile: int, column_tile: int, kernel: TileKernel
) -> None:
    """Solve rows r0:r1, columns c0:c1: a tile by the kernel, else two halves with one product between them."""
    rows, columns = r1 - r0, c1 - c0
    if rows <= row_tile and columns <= column_tile:
        kernel(s, r0, r1, c0, c1)
    elif rows * column_tile > columns * row_tile:
        middle = _split(r0, r1, row_tile)
        _solve(s, r0, middle, c0, c1, row_tile, column_tile, kernel)
        if s.U_out is not None:
            s.T[middle:r1, c0:c1].addmm_(s.U_out[r0:middle, middle:r1].T, s.P[r0:middle, c0:c1], alpha=-1)
        _solve(s, middle, r1, c0, c1, row_tile, column_tile, kernel)
    else:
        middle = _split(c0, c1, column_tile)
        _solve(s, r0, r1, c0, middle, row_tile, column_tile, kernel)
        if s.U_in is not None:
            s.P[r0:r1, middle:c1].addmm_(s.E[r0:r1, c0:middle], s.U_in[c0:middle, middle:c1])
        _solve(s, r0, r1, middle, c1, row_tile, column_tile, kernel)


def _split(start: int, end: int, tile: int) -> int:
    """A middle of [start, end) at a whole number of tiles from start."""
    tiles = -(-(end - start) // tile)
    return start + (tiles + 1) // 2 * tile
