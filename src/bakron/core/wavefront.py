"""The two-sided sweep for GPUs: divide and conquer over block anti-diagonals, all tiles of one in a single call.

The same E, P, T and the same multiplies as ``core.solver``, in an order with 2(m+n) sequential steps (solver.md,
section 3). Tile (I, J) lies on block anti-diagonal I + J. Once [a, mid) is solved, block row I has finished the
contiguous block columns a−I … mid−I, so that bringing [mid, c) up to date is one product batched over I (for P),
and one batched over J (for T). All arrays are stored with their rows bottom up: anti-diagonals become diagonals,
block row I's operands lie one tile further down and right than those of I + 1, and every stride is positive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid

TILE = 64  # tile edge; as large as a tile fits in the registers of a GPU's block of threads
OVERHANG = 4  # tiles of margin + 1: how many block rows whose ends differ share a product; saves launches, costs flops


@dataclass
class Wavefront:
    """The matrices of one sweep; the kernel and the recursion fill them. All in the dtype of the weight.

    W, T, P, E (as in ``core.solver.Sweep``) and codes (int16): rows bottom up, zero-padded to whole tiles, within a
    margin of ``margin`` tiles on each side.  scale, zero: (rows, n_groups) likewise by row.  group: (columns,).
    U_in: unit upper triangular, or None for the identity.  U_out: U_outᵀ with rows and columns reversed, which is
    unit upper triangular too, or None.  Both are zero in padding and margin, so nothing there has any effect.
    levels: (L,).  middles: (L−1,) between them.  uniform: whether the levels are consecutive integers.
    block_rows, block_columns: the number of tiles without margins.  tile: their edge.
    """

    W: Tensor
    T: Tensor
    P: Tensor
    E: Tensor
    codes: Tensor
    U_out: Tensor | None
    U_in: Tensor | None
    scale: Tensor
    zero: Tensor
    group: Tensor
    levels: Tensor
    middles: Tensor
    uniform: bool
    block_rows: int
    block_columns: int
    tile: int
    margin: int

    def blocks(self, x: Tensor, row: int, column: int, count: int, height: int = 1, width: int = 1) -> Tensor:
        """The view (count, height·tile, width·tile) of blocks of x, each one tile down and right of the one before.

        The first begins at tile (row, column), counted from the stored matrix's corner without its margin.
        """
        leading, b = x.stride(0), self.tile
        start = ((row + self.margin) * leading + column + self.margin) * b
        return x.as_strided((count, height * b, width * b), (b * (leading + 1), leading, 1), start)


RoundTiles = Callable[[Wavefront, int, int, int], None]
"""``round_tiles(wavefront, row, column, count)`` rounds the tiles (row, column), (row + 1, column + 1), …: reads T, W
and P, writes E, codes and the finished P; may overwrite T. Inside a tile, too, diagonals go from lower left on."""


@dataclass(frozen=True)
class WavefrontKernel:
    """A kernel that rounds all tiles of one block anti-diagonal at once."""

    round_tiles: RoundTiles


def sweep_wavefront(
    W: Tensor,
    grid: ScalarGrid,
    U_in: Tensor | None,
    U_out: Tensor | None,
    kernel: WavefrontKernel,
    tile: int,
) -> Tensor:
    """Round every entry of ``W`` (m, n) on the frozen ``grid`` in the product order; returns int16 codes (m, n).

    What ``core.solver.sweep`` computes, up to rounding in the dtype of W. A tile is never larger than the least power
    of two that covers the matrix. Nothing waits for the device once the grid is read.
    """
    m, n = W.shape
    if not (m and n):
        return torch.zeros(m, n, dtype=torch.int16, device=W.device)
    state = _lay_out(W, grid.to(W.dtype), U_in, U_out, min(tile, 1 << (max(m, n) - 1).bit_length()))
    _solve(state, 0, state.block_rows + state.block_columns - 1, kernel)
    first_row, first_column = _corner(state, m)
    return state.codes[first_row : first_row + m, first_column : first_column + n].flip(0)


def _lay_out(W: Tensor, grid: ScalarGrid, U_in: Tensor | None, U_out: Tensor | None, tile: int) -> Wavefront:
    m, n = W.shape
    block_rows, block_columns = -(-m // tile), -(-n // tile)
    margin = min(OVERHANG, block_rows, block_columns) - 1
    rows, columns = (blocks + 2 * margin for blocks in (block_rows, block_columns))
    left, top = margin * tile, (margin + block_rows) * tile - m

    def place(x: Tensor, shape: tuple[int, int], row: int, column: int, fill: float = 0.0) -> Tensor:
        stored = torch.full(shape, fill, dtype=W.dtype, device=W.device)
        stored[row : row + x.shape[0], column : column + x.shape[1]] = x
        return stored

    size, n_groups = (rows * tile, columns * tile), grid.scale.shape[1]
    weight = place(W.flip(0), size, top, left)
    group = torch.zeros(size[1], dtype=torch.int64, device=W.device)
    group[left : left + n] = grid.group
    return Wavefront(
        W=weight,
        T=weight.clone(),
        P=torch.zeros_like(weight),
        E=torch.zeros_like(weight),
        codes=torch.zeros(size, dtype=torch.int16, device=W.device),
        U_out=None if U_out is None else place(U_out.T.flip(0, 1), (size[0], size[0]), top, top),
        U_in=None if U_in is None else place(U_in, (size[1], size[1]), left, left),
        scale=place(grid.scale.flip(0), (size[0], n_groups), top, 0, fill=1.0),
        zero=place(grid.zero.flip(0), (size[0], n_groups), top, 0),
        group=group,
        levels=grid.levels.contiguous(),
        middles=(grid.levels[1:] + grid.levels[:-1]) / 2,
        uniform=grid.uniform,
        block_rows=block_rows,
        block_columns=block_columns,
        tile=tile,
        margin=margin,
    )


def _corner(s: Wavefront, m: int) -> tuple[int, int]:
    """Where the stored matrix of m rows begins: padding rows come first, since rows are bottom up."""
    return (s.margin + s.block_rows) * s.tile - m, s.margin * s.tile


def _solve(s: Wavefront, a: int, c: int, kernel: WavefrontKernel) -> None:
    """Solve block anti-diagonals [a, c): one by the kernel, else two halves with the products between them."""
    if c - a == 1:
        first, last = max(0, a - s.block_columns + 1), min(s.block_rows - 1, a)  # block rows I from the top
        kernel.round_tiles(s, s.block_rows - 1 - last, a - last, last - first + 1)
    else:
        mid = (a + c) // 2
        _solve(s, a, mid, kernel)
        if s.U_in is not None:
            _update_P(s, s.U_in, a, mid, c)
        if s.U_out is not None:
            _update_T(s, s.U_out, a, mid, c)
        _solve(s, mid, c, kernel)


def _update_P(s: Wavefront, U_in: Tensor, a: int, mid: int, c: int) -> None:
    """P[I, mid−I : c−I] += E[I, a−I : mid−I] U_in[a−I : mid−I, mid−I : c−I] for every block row I."""
    for first, last, start, end in _batches(a, mid, c, s.block_rows, s.block_columns):
        row, count, done, later = s.block_rows - 1 - last, last - first + 1, mid - start, end - mid
        E = s.blocks(s.E, row, start - last, count, 1, done)
        U = s.blocks(U_in, start - last, mid - last, count, done, later)
        s.blocks(s.P, row, mid - last, count, 1, later).baddbmm_(E, U)


def _update_T(s: Wavefront, U_out: Tensor, a: int, mid: int, c: int) -> None:
    """T[mid−J : c−J, J] −= U_out[a−J : mid−J, mid−J : c−J]ᵀ P[a−J : mid−J, J] for every block column J."""
    for first, last, start, end in _batches(a, mid, c, s.block_columns, s.block_rows):
        column, count, done, later = first, last - first + 1, mid - start, end - mid
        row_done, row_later = s.block_rows - mid + first, s.block_rows - end + first
        U = s.blocks(U_out, row_later, row_done, count, later, done)
        P = s.blocks(s.P, row_done, column, count, done, 1)
        s.blocks(s.T, row_later, column, count, later, 1).baddbmm_(U, P, alpha=-1)


def _batches(a: int, mid: int, c: int, lines: int, length: int) -> Iterator[tuple[int, int, int, int]]:
    """Batches (first, last, start, end) of lines: block rows of ``length`` tiles for P, block columns for T.

    Line I holds anti-diagonals I … I + length − 1. Those that hold all of [a, c) are one batch. The others with
    something on either side of mid go at most OVERHANG together, from ``start`` ≥ a to ``end`` ≤ c, which covers
    each of them and reaches less than OVERHANG tiles over its ends, into the margin.
    """
    first, stop = max(0, mid - length + 1), min(lines, mid)
    full = range(max(first, c - length), min(stop, a + 1))
    pieces = [*range(first, full.start, OVERHANG), full.start, *range(full.stop, stop, OVERHANG), stop]
    if not full:
        pieces = [*range(first, stop, OVERHANG), stop]
    for here, there in zip(pieces, pieces[1:], strict=False):
        if here < there:
            yield here, there - 1, max(a, here), min(c, there - 1 + length)
