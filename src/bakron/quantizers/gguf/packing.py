"""Blocks of codes as the bytes that llama.cpp and the ``gguf`` package read."""

from __future__ import annotations

import torch
from torch import Tensor

from bakron.errors import FormatError
from bakron.quantizers.gguf.kinds import KINDS, GgufGrid

COLUMNS = 256  # of a K-quant's block


def pack(grid: GgufGrid, codes: Tensor) -> Tensor:
    """The (m, bytes) uint8 rows of blocks for ``codes`` (m, n); they dequantize to ``grid.values(codes)`` in float32.

    Raises FormatError for codes of another shape or outside the grid.
    """
    kind = KINDS[grid.kind]
    m, n = grid.sub.shape[0], grid.sub.shape[1] * kind.size
    if codes.shape != (m, n) or (
        codes.numel() and not kind.low <= int(codes.min()) <= int(codes.max()) <= kind.high
    ):
        raise FormatError(
            f"{grid.kind}: expected ({m}, {n}) codes from {kind.low} to {kind.high}, got shape {tuple(codes.shape)}; "
            "pass the codes that were solved on this grid."
        )
    sub = grid.sub.to(torch.int32)
    q = codes.to(torch.int32)
    q = torch.where(sub.repeat_interleave(kind.size, 1) < 0, -1 - q, q).view(-1, kind.parts, kind.size)
    sub, submin = sub.view(-1, kind.parts), grid.submin.to(torch.int32).view(-1, kind.parts)
    d, dmin = grid.d.reshape(-1), grid.dmin.reshape(-1)
    if kind.sub_max == 1:
        blocks = _single(grid.kind, d * sub[:, 0], -dmin * submin[:, 0], q[:, 0])
    else:
        blocks = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}[grid.kind](
            _half(d), _half(dmin), sub, submin, q.reshape(-1, COLUMNS)
        )
    return blocks.reshape(m, -1)


def _half(x: Tensor) -> Tensor:
    """The (k, 2) bytes of float16 ``x`` (k,)."""
    return x.contiguous().view(torch.uint8).view(-1, 2)


def _join(*columns: Tensor) -> Tensor:
    return torch.cat([x.to(torch.uint8) for x in columns], 1)


def _nibbles(q: Tensor) -> Tensor:
    """q (…, 2, size), its first half in the low four bits."""
    return (q[..., 0, :] & 15) | (q[..., 1, :] & 15) << 4


def _bits(q: Tensor, width: int) -> Tensor:
    """q (…, 8 // width, size) → (…, size): item i in the bits from i·width."""
    shifts = torch.arange(0, 8, width, device=q.device)[:, None]
    return ((q & ((1 << width) - 1)) << shifts).sum(-2)


def _single(name: str, d: Tensor, minimum: Tensor, q: Tensor) -> Tensor:
    """Blocks of 32 with a scale, a minimum if any, the fifth bits if any, and the codes."""
    if name == "Q8_0":
        return _join(_half(d), q & 255)
    unsigned = q - KINDS[name].low
    head = [_half(d)] + ([_half(minimum)] if KINDS[name].minimum else [])
    if name.startswith("Q5"):
        head.append(_bits((unsigned >> 4).view(-1, 4, 8).mT, 1))
    return _join(*head, _nibbles(unsigned.view(-1, 2, 16)))


def _q2_k(d: Tensor, dmin: Tensor, sub: Tensor, submin: Tensor, q: Tensor) -> Tensor:
    return _join(sub | submin << 4, _bits(q.view(-1, 2, 4, 32), 2).flatten(1), d, dmin)


def _q3_k(d: Tensor, dmin: Tensor, sub: Tensor, submin: Tensor, q: Tensor) -> Tensor:
    q, sub = q + 4, sub + 32
    scales = torch.cat([_nibbles(sub.view(-1, 2, 8)), _bits((sub >> 4).view(-1, 4, 4), 2)], 1)
    return _join(_bits((q >> 2).view(-1, 8, 32), 1), _bits(q.view(-1, 2, 4, 32), 2).flatten(1), scales, d)


def _six_bit_pairs(sub: Tensor, submin: Tensor) -> Tensor:
    """(k, 12) bytes of eight 6-bit scales and eight 6-bit minima."""
    low, high = (slice(0, 4), slice(4, 8))
    return torch.cat(
        [x[:, low] | (x[:, high] >> 4) << 6 for x in (sub, submin)]
        + [(sub[:, high] & 15) | (submin[:, high] & 15) << 4],
        1,
    )


def _q4_k(d: Tensor, dmin: Tensor, sub: Tensor, submin: Tensor, q: Tensor) -> Tensor:
    return _join(d, dmin, _six_bit_pairs(sub, submin), _nibbles(q.view(-1, 4, 2, 32)).flatten(1))


def _q5_k(d: Tensor, dmin: Tensor, sub: Tensor, submin: Tensor, q: Tensor) -> Tensor:
    fifth = _bits((q >> 4).view(-1, 8, 32), 1)
    return _join(d, dmin, _six_bit_pairs(sub, submin), fifth, _nibbles(q.view(-1, 4, 2, 32)).flatten(1))


def _q6_k(d: Tensor, dmin: Tensor, sub: Tensor, submin: Tensor, q: Tensor) -> Tensor:
    q = q + 32
    low = _nibbles(q.view(-1, 2, 2, 64)).flatten(1)
    return _join(low, _bits((q >> 4).view(-1, 2, 4, 32), 2).flatten(1), sub & 255, d)
