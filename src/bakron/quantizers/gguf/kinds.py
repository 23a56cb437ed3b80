"""The block formats of llama.cpp as data, and the grid of a weight that is stored in one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid


class Kind(NamedTuple):
    """One block format: values d·sub·q − dmin·submin of whole numbers q, sub and submin and fp16 d and dmin.

    low, high: range of q.  size: columns that share sub and submin.  parts: how many such runs a block has.
    sub_max: largest |sub| and submin, 1 where a block has only d (and a minimum −dmin).  minimum: whether dmin exists;
    without it d (sub_max 1) or sub may be negative.
    """

    low: int
    high: int
    size: int
    parts: int
    sub_max: int
    minimum: bool

    @property
    def columns(self) -> int:
        """Columns in a block."""
        return self.size * self.parts


KINDS = {
    "Q4_0": Kind(-8, 7, 32, 1, 1, False),
    "Q4_1": Kind(0, 15, 32, 1, 1, True),
    "Q5_0": Kind(-16, 15, 32, 1, 1, False),
    "Q5_1": Kind(0, 31, 32, 1, 1, True),
    "Q8_0": Kind(-127, 127, 32, 1, 1, False),
    "Q2_K": Kind(0, 3, 16, 16, 15, True),
    "Q3_K": Kind(-4, 3, 16, 16, 31, False),
    "Q4_K": Kind(0, 15, 32, 8, 63, True),
    "Q5_K": Kind(0, 31, 32, 8, 63, True),
    "Q6_K": Kind(-32, 31, 16, 16, 127, False),
}


@dataclass(frozen=True, kw_only=True)
class GgufGrid(ScalarGrid):
    """The grid of a (m, n) weight and what its blocks store; a column group is a run of ``size`` columns.

    kind: a name of ``KINDS``.  d, dmin: (m, n_blocks) float16; the sign of dmin is that of −minimum.
    sub, submin: (m, n_groups) int16; sub < 0 stands for q = −(code + 1), by a zero of −1: the longer end of a
    signed range is then the positive one.
    """

    kind: str
    d: Tensor
    dmin: Tensor
    sub: Tensor
    submin: Tensor


def grid_of(name: str, dtype: torch.dtype, d: Tensor, dmin: Tensor, sub: Tensor, submin: Tensor) -> GgufGrid:
    """The grid in ``dtype`` of float16 ``d``, ``dmin`` (m, n_blocks) and int16 ``sub``, ``submin`` (m, n_groups).

    Scales and offsets are products of at most 18 bits, exact in float32.
    """
    kind = KINDS[name]
    levels = torch.arange(kind.low, kind.high + 1, device=d.device).to(dtype)
    group = torch.arange(sub.shape[1] * kind.size, device=d.device) // kind.size
    scale = d.to(dtype).repeat_interleave(kind.parts, 1) * sub.abs().to(dtype)
    offset = -dmin.to(dtype).repeat_interleave(kind.parts, 1) * submin.to(dtype)
    zero = -offset / scale if kind.minimum else -(sub < 0).to(dtype)
    return GgufGrid(
        levels,
        scale,
        zero,
        group,
        offset if kind.minimum else None,
        kind=name,
        d=d,
        dmin=dmin,
        sub=sub,
        submin=submin,
    )
