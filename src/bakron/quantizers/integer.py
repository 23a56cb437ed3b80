"""Integer grids of 2 to 8 bits with one scale, and an integer zero if asymmetric, for each row and column group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid
from bakron.core.groups import Groups, least_error, split
from bakron.errors import ConfigError

SHRINKS = 36  # scales tried by the search: this many fractions of the min-max scale
SMALLEST_SHRINK = 0.3


@dataclass(frozen=True)
class Integer:
    """Codes in [−2^(bits−1), 2^(bits−1) − 1], value = scale·(code − zero), zero an integer in the same range.

    group_size: columns that share a scale, −1 for the whole row; a last short group is allowed.
    scale: "minmax" covers every weight; "mse" takes the scale (and zero) of least squared rounding error.
    scale_dtype: scales are rounded to it before anything is solved, so that a checkpoint stores them exactly;
    None keeps the precision of the weight.
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    scale: Literal["minmax", "mse"] = "mse"
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.bits, int) and 2 <= self.bits <= 8):
            raise ConfigError(f"bits: {self.bits!r} is not a whole number from 2 to 8.")
        if self.group_size != -1 and self.group_size < 1:
            raise ConfigError(f"group_size: {self.group_size} is neither positive nor -1 (the whole row).")
        if self.scale not in ("minmax", "mse"):
            raise ConfigError(f"scale: {self.scale!r} is not one of minmax, mse.")

    def fit(self, weight: Tensor) -> ScalarGrid:
        """The grid for ``weight`` (m, n), in float64 if the weight is, else float32. Raises NonFiniteError."""
        groups = split(weight, self.group_size)
        candidates = self._candidates(groups)
        if self.scale == "mse" and groups.values.numel():
            scale, zero = least_error(candidates, lambda *parameters: self._error(groups.values, *parameters))
        else:
            scale, zero = next(candidates)
        low = -(2 ** (self.bits - 1))
        levels = torch.arange(low, -low, dtype=scale.dtype, device=scale.device)
        return ScalarGrid(
            levels, groups.restored(scale).view(groups.shape), zero.view(groups.shape), groups.group
        )

    def _candidates(self, groups: Groups) -> Iterator[tuple[Tensor, Tensor]]:
        """Scale and zero (both (k,)) for the k lines of ``groups``: min-max first, then ever smaller ranges."""
        low, high = -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
        least, most = groups.values.amin(1).clamp(max=0), groups.values.amax(1).clamp(min=0)
        for shrink in torch.linspace(1, SMALLEST_SHRINK, SHRINKS).tolist():
            if self.symmetric:
                reach = torch.maximum(least / low, most / high)
                scale = groups.storable(shrink * reach, self.scale_dtype)
                zero = torch.zeros_like(scale)
            else:
                scale = groups.storable(shrink * (most - least) / (high - low), self.scale_dtype)
                zero = (low - shrink * least / scale).round().clamp(low, high)
            yield scale, zero

    def _error(self, values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        low, high = -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
        scale, zero = scale[:, None], zero[:, None]
        rounded = (values / scale).round_().add_(zero).clamp_(low, high).sub_(zero).mul_(scale)
        return rounded.sub_(values).square_().sum(1)


QUANTIZER = Integer
