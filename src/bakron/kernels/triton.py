"""Kernel for CUDA GPUs in Triton: one program for each tile of a block anti-diagonal, the tile in registers.

The tests run it under Triton's interpreter (``TRITON_INTERPRET=1``, on a CPU) and compile it for sm_90. It has never
been run or timed on a GPU, and ENTRIES_PER_THREAD is a guess (no spilled registers at 64×64 in float32). Memory is
accessed along rows where a whole tile is, there are no atomics, and no program reads what another one writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bakron.core.wavefront import Wavefront
from bakron.errors import ConfigError

ENTRIES_PER_THREAD = 16


def round_tiles(s: Wavefront, row: int, column: int, count: int) -> None:
    """Round ``count`` tiles in one launch; see ``core.wavefront.RoundTiles``.

    Raises ConfigError off the GPU (unless interpreted) and for a tile edge that is not a power of two.
    """
    if s.W.device.type != "cuda" and isinstance(_round, triton.runtime.JITFunction):
        raise ConfigError(
            f"kernel triton runs on a CUDA GPU, the weight is on {s.W.device}: choose kernel numba."
        )
    if s.tile & (s.tile - 1):
        raise ConfigError(f"kernel triton: a tile edge must be a power of two, got {s.tile}.")
    i, j = (row + s.margin) * s.tile, (column + s.margin) * s.tile
    n_middles = 0 if s.uniform else len(s.middles)
    _round[(count,)](
        s.W[i:, j:],
        s.T[i:, j:],
        s.P[i:, j:],
        s.E[i:, j:],
        s.codes[i:, j:],
        s.W if s.U_out is None else s.U_out[i:, i:],
        s.W if s.U_in is None else s.U_in[j:, j:],
        s.scale[i:],
        s.zero[i:],
        s.group[j:],
        s.levels,
        s.middles,
        s.W.stride(0),
        s.scale.stride(0),
        0 if s.U_out is None else s.U_out.stride(0),
        0 if s.U_in is None else s.U_in.stride(0),
        len(s.levels),
        TILE=s.tile,
        UNIFORM=s.uniform,
        MIDDLES=1 << max(n_middles - 1, 0).bit_length(),
        TWO_SIDED=s.U_out is not None,
        HAS_U_IN=s.U_in is not None,
        num_warps=max(1, s.tile**2 // (32 * ENTRIES_PER_THREAD)),
        enable_fp_fusion=True,
    )


@triton.jit
def _rint(x):
    """x rounded to an integer, halves to even, as torch and numpy do."""
    low = tl.floor(x)
    rest = x - low
    odd = low - 2 * tl.floor(low * 0.5)
    return low + ((rest > 0.5) | ((rest == 0.5) & (odd == 1))).to(x.dtype)


@triton.jit
def _round(
    W,
    T,
    P,
    E,
    codes,
    U_out,
    U_in,
    scale,
    zero,
    group,
    levels,
    middles,
    leading,
    n_groups,
    leading_out,
    leading_in,
    n_levels,
    TILE: tl.constexpr,
    UNIFORM: tl.constexpr,
    MIDDLES: tl.constexpr,
    TWO_SIDED: tl.constexpr,
    HAS_U_IN: tl.constexpr,
):
    corner = tl.program_id(0).to(tl.int64) * TILE
    tile = corner * (leading + 1)
    row, column = tl.arange(0, TILE), tl.arange(0, TILE)
    entries = tile + row[:, None] * leading + column[None, :]
    target = tl.load(T + entries)  # T; of entries that are done, anything
    left = tl.load(P + entries)  # P; of entries that are not done, P without E[i, j]
    lowest, highest = tl.load(levels), tl.load(levels + n_levels - 1)
    search = tl.arange(0, MIDDLES)
    middle = tl.load(middles + search, mask=search < n_levels - 1, other=float("inf"))
    for offset in range(1 - TILE, TILE):  # the entries (i, i + offset): all that they depend on is done
        now = column[None, :] - row[:, None] == offset
        j = row + offset
        inside = (j >= 0) & (j < TILE)
        g = tl.load(group + corner + j, mask=inside, other=0)
        unit = tl.load(scale + (corner + row) * n_groups + g, mask=inside, other=1)
        origin = tl.load(zero + (corner + row) * n_groups + g, mask=inside, other=0)
        w = tl.load(W + tile + row * leading + j, mask=inside, other=0)
        before = tl.sum(tl.where(now, left, 0), 1)
        position = tl.sum(tl.where(now, target - left, 0), 1) / unit + origin
        if UNIFORM:
            level = _rint(tl.minimum(tl.maximum(position, lowest), highest))
            code = level.to(tl.int16)
        else:
            index = tl.sum((position[:, None] > middle[None, :]).to(tl.int32), 1)
            level = tl.load(levels + index)
            code = index.to(tl.int16)
        error = unit * (level - origin) - w
        tl.store(E + tile + row * leading + j, error, mask=inside)
        tl.store(codes + tile + row * leading + j, code, mask=inside)
        if HAS_U_IN:
            at = U_in + corner * (leading_in + 1) + j[:, None] * leading_in + column[None, :]
            left += error[:, None] * tl.load(at, mask=inside[:, None], other=0)  # its unit diagonal adds E
        else:
            left += tl.where(now, error[:, None], 0)
        if TWO_SIDED:
            done = tl.sum(tl.where(now, (before + error)[:, None], 0), 0)  # P at now, by column
            i = column - offset
            at = U_out + corner * (leading_out + 1) + row[:, None] * leading_out + i[None, :]
            target -= done[None, :] * tl.load(at, mask=((i >= 0) & (i < TILE))[None, :], other=0)
    tl.store(P + entries, left)
