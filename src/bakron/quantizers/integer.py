"""Integer grids of 2 to 8 bits with one scale, and an integer zero if asymmetric, for each row and column group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid
from bakron.core.groups import Groups, least_error, require_group_size, split
from bakron.errors import ConfigError, NonFiniteError, ShapeError, require_one_of

Scale = Literal["minmax", "mse", "hessian"]
SHRINKS = 36  # scales tried by the search: this many fractions of the min-max scale
SMALLEST_SHRINK = 0.3


@dataclass(frozen=True)
class Integer:
    """Codes in [−2^(bits−1), 2^(bits−1) − 1], value = scale·(code − zero), zero an integer in the same range.

    group_size: columns that share a scale, −1 for the whole row; a last short group is allowed.
    scale: "minmax" covers every weight; "mse" takes the scale (and zero) of least squared rounding error; "hessian" the same
    with the squared errors weighted by what they cost in each column. A searched scale may be negative: a symmetric grid has
    one level more below than above, and which side needs it differs from group to group (llama.cpp's Q4_0 does the same).
    scale_dtype: scales are rounded to it before anything is solved, so that a checkpoint stores them exactly;
    None keeps the precision of the weight.
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    scale: Scale = "mse"
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.bits, int) and 2 <= self.bits <= 8):
            raise ConfigError(f"bits: {self.bits!r} is not a whole number from 2 to 8.")
        require_group_size(self.group_size)
        require_one_of("scale", self.scale, get_args(Scale))

    def fit(self, weight: Tensor, column_weights: Tensor | None = None) -> ScalarGrid:
        """The grid for ``weight`` (m, n), in float64 if the weight is, else float32.

        column_weights: (n,) ≥ 0, what a squared error in each column costs, read by scale "hessian" only; None, and all
        zeros in a group, is the same for all. In the two-sided loss it is D_in (``LayerProblem.column_weights``).
        Raises NonFiniteError, ShapeError.
        """
        groups = split(weight, self.group_size)
        candidates = self._candidates(groups)
        importance = None
        if column_weights is not None and self.scale == "hessian":
            importance = _importance(
                column_weights.to(groups.values), weight.shape[1], groups.values.shape[1]
            )
        error = partial(self._error, groups.values, importance)
        scale, zero = least_error(candidates, error, self.scale != "minmax")
        low = -(2 ** (self.bits - 1))
        levels = torch.arange(low, -low, dtype=scale.dtype, device=scale.device)
        return ScalarGrid(
            levels, groups.restored(scale).view(groups.shape), zero.view(groups.shape), groups.group
        )

    def storable(self, scale: Tensor) -> Tensor:
        """The nearest scales to ``scale`` that a checkpoint can hold, of the same signs: never infinite or 0."""
        dtype = self.scale_dtype or scale.dtype
        limits = torch.finfo(dtype)
        size = scale.abs().clamp(limits.tiny * limits.eps, limits.max).to(dtype).to(scale.dtype)
        return torch.where(scale < 0, -size, size)

    def _candidates(self, groups: Groups) -> Iterator[tuple[Tensor, Tensor]]:
        """Scale and zero (both (k,)) for the k lines of ``groups``: min-max first, then ever smaller ranges.

        A symmetric grid has one level more on one side, and the sign of the scale says on which. An asymmetric one may give
        up more on one side than on the other.
        """
        low, high = -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
        least, most = groups.values.amin(1).clamp(max=0), groups.values.amax(1).clamp(min=0)
        for shrink in torch.linspace(1, SMALLEST_SHRINK, SHRINKS).tolist():
            if self.symmetric:
                zero = torch.zeros_like(least)
                for sign, reach in (
                    (1, torch.maximum(least / low, most / high)),
                    (-1, torch.maximum(most / -low, least / -high)),
                ):
                    yield sign * groups.storable(shrink * reach, self.scale_dtype), zero
            else:
                scale = groups.storable(shrink * (most - least) / (high - low), self.scale_dtype)
                zero = (low - shrink * least / scale).round()
                for step in (0, -1, 1):
                    yield scale, (zero + step).clamp(low, high)

    def _error(self, values: Tensor, importance: Tensor | None, scale: Tensor, zero: Tensor) -> Tensor:
        low, high = -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
        scale, zero = scale[:, None], zero[:, None]
        rounded = (values / scale).round_().add_(zero).clamp_(low, high).sub_(zero).mul_(scale)
        squared = rounded.sub_(values).square_()
        if importance is not None:
            squared.view(-1, *importance.shape).mul_(importance)
        return squared.sum(1)


def _importance(column_weights: Tensor, n: int, size: int) -> Tensor:
    """The weights (n_groups, size) of the columns of each group, divided by their mean; 1 where all are 0."""
    if column_weights.shape != (n,):
        raise ShapeError(
            f"column weights: expected one for each of {n} columns, got shape {tuple(column_weights.shape)}."
        )
    if not bool((torch.isfinite(column_weights) & (column_weights >= 0)).all()):
        raise NonFiniteError(
            "column weights: some are negative, NaN or infinite; the Hessian is not a sum of squares."
        )
    padded = column_weights.new_zeros(-(-n // size) * size if n else 0)
    padded[:n] = column_weights
    groups = padded.view(-1, max(size, 1))
    mean = groups.mean(1, keepdim=True)
    return torch.where(mean > 0, groups / mean, torch.ones_like(groups))


QUANTIZER = Integer
