"""NormalFloat4 grids (QLoRA, arXiv 2305.14314): 16 levels at quantiles of the normal distribution, times a scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid
from bakron.core.groups import Groups, least_error, require_group_size, split
from bakron.errors import require_one_of

FACTORS = torch.linspace(
    0.6, 1.4, 41
).tolist()  # scales tried by the search, as fractions of the largest magnitude


def nf4_levels() -> Tensor:
    """The 16 levels from −1 to 1 (float64): zero, 7 below it and 8 above.

    Quantiles of N(0, 1) at evenly spaced probabilities from δ to ½ and from ½ to 1 − δ, each side with a point at ½
    that is zero, divided by the largest; δ = ½(1/32 + 1/30). Published tables, rounded on their way, differ by ≤ 2e-7.
    """
    last = 1 - (1 / 32 + 1 / 30) / 2
    above, below = (
        torch.special.ndtri(torch.linspace(0.5, last, points, dtype=torch.float64)) for points in (9, 8)
    )
    return torch.cat([-below.flip(0), above[1:]]) / above[-1]


@dataclass(frozen=True)
class NF4:
    """Codes 0 to 15, value = scale·level.

    group_size: columns that share a scale, −1 for the whole row; a last short group is allowed.
    scale: "absmax" is the largest magnitude of the group, as in QLoRA; "mse" searches around it for the least squared
    rounding error.  scale_dtype: scales are rounded to it before anything is solved; None keeps the weight's precision.
    """

    group_size: int = 64
    scale: Literal["absmax", "mse"] = "mse"
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        require_group_size(self.group_size)
        require_one_of("scale", self.scale, ("absmax", "mse"))

    def fit(self, weight: Tensor) -> ScalarGrid:
        """The grid for ``weight`` (m, n), in float64 if the weight is, else float32. Raises NonFiniteError."""
        groups = split(weight, self.group_size)
        levels = nf4_levels().to(groups.values)
        candidates = self._candidates(groups)
        (scale,) = least_error(candidates, partial(groups.error, levels), self.scale == "mse")
        return groups.grid(levels, scale)

    def _candidates(self, groups: Groups) -> Iterator[tuple[Tensor]]:
        """The largest magnitude, then fractions and multiples of it."""
        largest = groups.values.abs().amax(1)
        for factor in (1.0, *FACTORS):
            yield (groups.storable(factor * largest, self.scale_dtype),)


QUANTIZER = NF4
