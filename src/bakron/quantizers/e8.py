"""E8 lattice grids of 1 or 2 bits: runs of eight columns are rounded together to a ball of lattice points, times a scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from bakron.core.groups import Groups, least_error, split
from bakron.core.vector import RUN, VectorGrid, nearest_codes
from bakron.errors import ConfigError, FormatError, require_one_of

RADIUS = {1: 2, 2: 10}  # largest squared norms with at most 2^(8·bits) points: 241 and 56,881
SHRINKS = 14  # scales tried by the search: this many fractions of the scale that covers
SMALLEST_SHRINK = 0.35


@dataclass(frozen=True)
class E8:
    """Codes that in runs of eight columns are twice a point of E8 within a ball, value = scale·code.

    bits: 1 or 2, for balls whose points have indices of 8 or 16 bits.
    group_size: columns that share a scale, a multiple of 8 or −1 for the whole row; a last short group is allowed.
    scale: "absmax" brings every run into the ball; "mse" takes the scale of least squared rounding error.
    scale_dtype: scales are rounded to it before anything is solved; None keeps the weight's precision.
    """

    bits: Literal[2, 1] = 2
    group_size: int = 128
    scale: Literal["absmax", "mse"] = "mse"
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        require_one_of("bits", self.bits, (2, 1))
        if self.group_size != -1 and (self.group_size < 1 or self.group_size % RUN):
            raise ConfigError(
                f"group_size: {self.group_size} is neither a multiple of {RUN} nor -1 (the whole row)."
            )
        require_one_of("scale", self.scale, ("absmax", "mse"))

    def fit(self, weight: Tensor) -> VectorGrid:
        """The grid for ``weight`` (m, n), in float64 if the weight is, else float32.

        Raises NonFiniteError; FormatError when n is not a multiple of 8.
        """
        if weight.shape[1] % RUN:
            raise FormatError(
                f"e8: rounds runs of {RUN} columns, the weight has {weight.shape[1]}. Use a scalar quantizer for it."
            )
        groups = split(weight, self.group_size)
        candidates = self._candidates(groups)
        (scale,) = least_error(candidates, partial(self._error, groups.values), self.scale == "mse")
        radius = RADIUS[self.bits]
        most = int((4 * radius) ** 0.5)
        grid = groups.grid(torch.arange(-most, most + 1).to(scale), scale)
        return VectorGrid(grid.levels, grid.scale, grid.zero, grid.group, radius=radius)

    def _candidates(self, groups: Groups) -> Iterator[tuple[Tensor]]:
        """The scale that brings the longest run of each group to the edge of the ball, then fractions of it."""
        if groups.values.numel():
            longest = groups.values.view(len(groups.values), -1, RUN).square().sum(2).amax(1).sqrt()
        else:
            longest = groups.values.new_zeros(len(groups.values))
        covering = longest / (4 * RADIUS[self.bits]) ** 0.5
        for shrink in torch.linspace(1, SMALLEST_SHRINK, SHRINKS).tolist():
            yield (groups.storable(shrink * covering, self.scale_dtype),)

    def _error(self, values: Tensor, scale: Tensor) -> Tensor:
        unit = 2 * scale[:, None]
        codes, _ = nearest_codes((values / unit).view(-1, RUN), RADIUS[self.bits])
        return (codes.view(values.shape).to(values.dtype) / 2 * unit - values).square().sum(1)


QUANTIZER = E8
