"""Ternary grids, 1.58 bits a weight: −scale, 0 and scale for each row and column group."""

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


@dataclass(frozen=True)
class Ternary:
    """Codes −1, 0 and 1, value = scale·code.

    group_size: columns that share a scale, −1 for the whole row; a last short group is allowed.
    scale: "absmax" is the largest magnitude of the group; "mse" the scale of least squared rounding error, found
    exactly.  scale_dtype: scales are rounded to it before anything is solved; None keeps the weight's precision.
    """

    group_size: int = 128
    scale: Literal["absmax", "mse"] = "mse"
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        require_group_size(self.group_size)
        require_one_of("scale", self.scale, ("absmax", "mse"))

    def fit(self, weight: Tensor) -> ScalarGrid:
        """The grid for ``weight`` (m, n), in float64 if the weight is, else float32. Raises NonFiniteError."""
        groups = split(weight, self.group_size)
        levels = torch.tensor([-1, 0, 1], dtype=groups.values.dtype, device=groups.values.device)
        candidates = self._candidates(groups)
        (scale,) = least_error(candidates, partial(groups.error, levels), self.scale == "mse")
        return groups.grid(levels, scale)

    def _candidates(self, groups: Groups) -> Iterator[tuple[Tensor]]:
        """The largest magnitude, then the best scale.

        If the k largest magnitudes, of sum S_k, become ±scale, the error is Σw² − S_k²/k at best, for scale = S_k/k.
        """
        magnitude = groups.values.abs().sort(1, descending=True).values
        yield (groups.storable(magnitude[:, 0], self.scale_dtype),)
        count = torch.arange(1, magnitude.shape[1] + 1, dtype=magnitude.dtype, device=magnitude.device)
        mean = magnitude.cumsum(1) / count
        best = (mean.square() * count).argmax(1, keepdim=True)
        yield (groups.storable(mean.gather(1, best)[:, 0], self.scale_dtype),)


QUANTIZER = Ternary
