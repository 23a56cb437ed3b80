"""Dense bit packing: integers of 1 to 8 bits as one little-endian stream of int32 words along the last dimension.

Code i occupies the bits ``i * bits`` to ``(i + 1) * bits - 1`` of the stream, so that codes of 3, 5, 6 and 7 bits
cross word borders. Eight codes are always ``bits`` whole bytes, which is the unit of work here.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from bakron.errors import FormatError


def n_words(n: int, bits: int) -> int:
    """The int32 words that n codes take.

    >>> n_words(11, 3)
    2
    """
    return -(-n * bits // 32)


def pack_unsigned(codes: Tensor, bits: int) -> Tensor:
    """(..., n) integers in [0, 2^bits - 1] -> (..., n_words(n, bits)) int32; the unused last bits are 0.

    Raises FormatError when bits is not in 1..8 or a code is out of range.

    >>> pack_unsigned(torch.tensor([1, 2, 3, 0, 0, 0, 0, 8]), 4)
    tensor([-2147482847], dtype=torch.int32)
    """
    _check(bits)
    if codes.numel() and not (int(codes.min()) >= 0 and int(codes.max()) < 1 << bits):
        seen = f"{int(codes.min())} to {int(codes.max())}"
        raise FormatError(f"codes of {bits} bits must lie in 0 to {(1 << bits) - 1}, seen {seen}")
    n = codes.shape[-1]
    octets = _resize(codes.to(torch.uint8), -(-n // 8) * 8).unflatten(-1, (-1, 8))
    stream = torch.zeros(octets.shape[:-1], dtype=torch.int64, device=codes.device)
    for k in range(8):
        stream |= octets[..., k].to(torch.int64) << (k * bits)
    octet_bytes = stream.unsqueeze(-1).view(torch.uint8)[..., :bits].flatten(-2)
    return _resize(octet_bytes, 4 * n_words(n, bits)).view(torch.int32)


def unpack_unsigned(words: Tensor, bits: int, n: int) -> Tensor:
    """The inverse of pack_unsigned: (..., n_words(n, bits)) int32 -> (..., n) uint8.

    Raises FormatError when the number of words does not fit n codes.
    """
    _check(bits)
    if words.shape[-1] != n_words(n, bits):
        expected = f"{n} codes of {bits} bits take {n_words(n, bits)} words"
        raise FormatError(
            f"{expected}, seen {words.shape[-1]}: the stored shape or the number of bits is wrong"
        )
    stream_bytes = _resize(words.contiguous().view(torch.uint8), -(-n // 8) * bits).unflatten(-1, (-1, bits))
    stream = _resize(stream_bytes, 8).view(torch.int64)
    codes = (stream >> (torch.arange(8, device=words.device) * bits)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2)[..., :n].contiguous()


def pack_signed(codes: Tensor, bits: int) -> Tensor:
    """(..., n) integers in [-2^(bits-1), 2^(bits-1) - 1], stored as code + 2^(bits-1), -> int32 words."""
    return pack_unsigned(codes.to(torch.int32) + (1 << (bits - 1)), bits)


def unpack_signed(words: Tensor, bits: int, n: int) -> Tensor:
    """The inverse of pack_signed: int32 words -> (..., n) int8."""
    return (unpack_unsigned(words, bits, n).to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def _resize(values: Tensor, n: int) -> Tensor:
    """A contiguous copy with the last dimension cut to n or filled up with zeros."""
    kept = min(n, values.shape[-1])
    resized = values.new_zeros((*values.shape[:-1], n))
    resized[..., :kept] = values[..., :kept]
    return resized


def _check(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise FormatError(f"codes of {bits} bits cannot be packed: expected 1 to 8 bits")
    if sys.byteorder != "little":
        raise FormatError("bit packing needs a little-endian machine")
