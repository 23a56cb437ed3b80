"""Symmetric matrices as packed lower triangles, row after row, which are half as large."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

import torch
from torch import Tensor

from bakron.errors import ShapeError

ROWS = 512  # that are transposed at once


def pack(H: Tensor) -> Tensor:
    """float32 (n(n+1)/2,) of the (n, n) ``H``: entry (i, j ≤ i) of (H + Hᵀ)/2 at i(i+1)/2 + j.

    >>> pack(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
    tensor([1., 2., 3.])
    """
    packed = H.new_empty(len(H) * (len(H) + 1) // 2, dtype=torch.float32)
    for a, b in _parts(len(H)):
        rows = (H[a:b, :b] + H[:b, a:b].T) / 2
        for i in range(a, b):
            packed[_start(i) : _start(i + 1)] = rows[i - a, : i + 1]
    return packed


def unpack(packed: Tensor) -> Tensor:
    """The whole symmetric matrix (n, n) of a packed triangle (n(n+1)/2,). Raises ShapeError."""
    n = packed_size(packed.numel())
    H = packed.new_empty(n, n)
    for a, b in _parts(n):
        for i in range(a, b):
            H[i, : i + 1] = packed[_start(i) : _start(i + 1)]
        H[:a, a:b] = H[a:b, :a].T
        corner = H[a:b, a:b].tril()
        H[a:b, a:b] = corner + corner.tril(-1).T
    return H


def packed_size(length: int) -> int:
    """n of a triangle of ``length`` = n(n+1)/2 numbers. Raises ShapeError."""
    n = (isqrt(8 * length + 1) - 1) // 2
    if n * (n + 1) // 2 != length:
        raise ShapeError(f"expected a packed triangle of n(n+1)/2 numbers for some n, seen {length}.")
    return n


def _start(i: int) -> int:
    """Where row i begins."""
    return i * (i + 1) // 2


def _parts(n: int) -> Iterator[tuple[int, int]]:
    for a in range(0, n, ROWS):
        yield a, min(a + ROWS, n)
