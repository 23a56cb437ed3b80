"""Scalar quantization grids as plain data: levels, and a scale and a zero for each row and column group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScalarGrid:
    """The values ``scale·(level − zero)`` that each weight of an (m, n) matrix may take.

    levels: (L,) ascending.  scale, zero: (m, n_groups), scale ≠ 0, of either sign; zero need not be a whole number.
    group: (n,) int64, column → group.  offset: (m, n_groups) or None, for formats that store ``scale·level + offset``:
    then this is what ``values`` computes, in this order, and zero is −offset/scale (``with_offset``). Sweeps use
    zero alone; in their precision the two are the same.
    When the levels are consecutive integers a weight's code is its level, value = scale·(code − zero);
    otherwise its code is the index of its level.
    """

    run: ClassVar[int] = 1  # columns that are rounded together

    levels: Tensor
    scale: Tensor
    zero: Tensor
    group: Tensor
    offset: Tensor | None = None

    @classmethod
    def with_offset(cls, levels: Tensor, scale: Tensor, offset: Tensor, group: Tensor) -> ScalarGrid:
        """The grid of the values ``scale·level + offset``."""
        return cls(levels, scale, -offset / scale, group, offset)

    @cached_property
    def uniform(self) -> bool:
        """Whether the levels are consecutive integers, so that rounding is arithmetic instead of a search."""
        first = float(self.levels[0])
        steps = torch.arange(len(self.levels), dtype=self.levels.dtype, device=self.levels.device)
        return first.is_integer() and bool((self.levels - first == steps).all())

    @property
    def first_code(self) -> int:
        """The code of the lowest level."""
        return int(self.levels[0]) if self.uniform else 0

    def permute(self, rows: Tensor, columns: Tensor) -> ScalarGrid:
        """The same grid for the matrix ``W[rows][:, columns]``."""
        offset = None if self.offset is None else self.offset[rows]
        return ScalarGrid(self.levels, self.scale[rows], self.zero[rows], self.group[columns], offset)

    def to(self, dtype: torch.dtype) -> ScalarGrid:
        """The grid with levels, scales and zeros in ``dtype``."""
        levels, scale = self.levels.to(dtype), self.scale.to(dtype)
        if self.offset is not None:
            return ScalarGrid.with_offset(levels, scale, self.offset.to(dtype), self.group)
        return ScalarGrid(levels, scale, self.zero.to(dtype), self.group)

    def _by_column(self, x: Tensor) -> Tensor:
        """``x`` (m, n_groups) for each column, (m, n)."""
        return x.index_select(1, self.group)

    def values(self, codes: Tensor) -> Tensor:
        """The (m, n) weights that ``codes`` (m, n) stand for, in the dtype of ``scale``."""
        level = codes if self.uniform else self.levels[codes.to(torch.int64)]
        level = level.to(self.scale.dtype, copy=True)  # worked on in place: whole matrices are large
        if self.offset is not None:
            return level.mul_(self._by_column(self.scale)).add_(self._by_column(self.offset))
        return level.sub_(self._by_column(self.zero)).mul_(self._by_column(self.scale))

    def nearest(self, values: Tensor) -> Tensor:
        """The (m, n) int16 codes of the grid values nearest to ``values`` (round to nearest)."""
        position = values / self._by_column(self.scale) + self._by_column(self.zero)
        if self.uniform:
            low, high = float(self.levels[0]), float(self.levels[-1])
            return position.round().clamp(low, high).to(torch.int16)
        middles = (self.levels[1:] + self.levels[:-1]) / 2
        return torch.bucketize(position.contiguous(), middles.to(position.dtype)).to(torch.int16)

    def excess(self, target: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """By how many level units ``target`` (m, n) lies outside the rounding cell of its code, and which are clipped.

        Returns (excess, clipped): excess ≤ 0 means that the code is the nearest one. For a uniform grid and an
        unclipped code it is |target − value|/scale − ½. A code is clipped when it is the lowest or the highest.
        """
        position = target / self._by_column(self.scale) + self._by_column(self.zero)
        if self.uniform:
            low, high = codes == int(self.levels[0]), codes == int(self.levels[-1])
            beyond = position.sub_(codes)
            below = (-0.5 - beyond).masked_fill_(low, -torch.inf)
            return torch.maximum(below, beyond.sub_(0.5).masked_fill_(high, -torch.inf)), low | high
        index = codes.to(torch.int64)
        levels = self.levels.to(position.dtype)
        middles = (levels[1:] + levels[:-1]) / 2
        infinity = levels.new_full((1,), torch.inf)
        below = torch.cat([-infinity, middles])[index] - position
        above = position - torch.cat([middles, infinity])[index]
        return torch.maximum(below, above), (index == 0) | (index == len(levels) - 1)
