"""Integer grids of 2 to 8 bits with one scale, and an integer zero if asymmetric, for each row and column group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid
from bakron.errors import ConfigError, NonFiniteError, ShapeError

Scale = Literal["minmax", "mse", "hessian"]
SHRINKS = 36  # scales tried by the search: this many fractions of the min-max scale
SMALLEST_SHRINK = 0.3


@dataclass(frozen=True)
class Integer:
    """Codes in [−2^(bits−1), 2^(bits−1) − 1], value = scale·(code − zero), zero an integer in the same range.

    group_size: columns that share a scale, −1 for the whole row; a last short group is allowed.
    scale: "minmax" covers every weight; "mse" takes the scale (and zero) of least squared rounding error; "hessian" the same
    with the squared errors weighted by what they cost in each column.
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
        if self.group_size != -1 and self.group_size < 1:
            raise ConfigError(f"group_size: {self.group_size} is neither positive nor -1 (the whole row).")
        if self.scale not in get_args(Scale):
            raise ConfigError(f"scale: {self.scale!r} is not one of {', '.join(get_args(Scale))}.")

    def fit(self, weight: Tensor, column_weights: Tensor | None = None) -> ScalarGrid:
        """The grid for ``weight`` (m, n), in float64 if the weight is, else float32.

        column_weights: (n,) ≥ 0, what a squared error in each column costs, read by scale "hessian" only; None, and all
        zeros in a group, is the same for all. In the two-sided loss it is D_in (``LayerProblem.column_weights``).
        Raises NonFiniteError, ShapeError.
        """
        work = weight.detach().to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
        if not torch.isfinite(work).all():
            raise NonFiniteError("the weight to quantize holds NaN or infinite values.")
        m, n = work.shape
        size = min(n, self.group_size) if self.group_size != -1 else n
        group = torch.arange(n, device=work.device) // max(size, 1)
        n_groups = -(-n // size) if n else 0
        padded = work.new_zeros(m, n_groups * size)
        padded[:, :n] = work  # zeros are exact on every grid below: they add no error
        groups = padded.view(m * n_groups, size) if n else padded.view(m, 0)
        weighted = column_weights is not None and self.scale == "hessian"
        importance = None if not weighted else _importance(column_weights.to(work), n, size)
        scale, zero = self._choose(groups, importance) if groups.numel() else groups.new_zeros(2, 0)
        low = -(2 ** (self.bits - 1))
        levels = torch.arange(low, -low, dtype=work.dtype, device=work.device)
        return ScalarGrid(levels, scale.view(m, n_groups), zero.view(m, n_groups), group)

    def _choose(self, groups: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scale and zero (both (k,)) for the k rows of ``groups``; min-max unless the search finds better."""
        candidates = self._candidates(groups)
        best_scale, best_zero = next(candidates)
        if self.scale == "minmax":
            return best_scale, best_zero
        best_error = self._error(groups, importance, best_scale, best_zero)
        for scale, zero in candidates:
            error = self._error(groups, importance, scale, zero)
            better = error < best_error
            best_scale = torch.where(better, scale, best_scale)
            best_zero = torch.where(better, zero, best_zero)
            best_error = torch.where(better, error, best_error)
        return best_scale, best_zero

    def _candidates(self, groups: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Scale and zero (both (k,)) for the k rows of ``groups``: min-max first, then ever smaller ranges."""
        low, high = -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
        least, most = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
        for shrink in torch.linspace(1, SMALLEST_SHRINK, SHRINKS).tolist():
            if self.symmetric:
                scale = self._storable(shrink * torch.maximum(least / low, most / high))
                zero = torch.zeros_like(scale)
            else:
                scale = self._storable(shrink * (most - least) / (high - low))
                zero = (low - shrink * least / scale).round().clamp(low, high)
            yield scale, zero

    def _storable(self, scale: Tensor) -> Tensor:
        """``scale`` as the checkpoint will hold it; 1 for groups of zeros, never 0 or infinite."""
        dtype = self.scale_dtype or scale.dtype
        limits = torch.finfo(dtype)
        stored = scale.clamp(limits.tiny * limits.eps, limits.max).to(dtype).to(scale.dtype)
        return torch.where(scale > 0, stored, torch.ones_like(scale))

    def _error(self, groups: Tensor, importance: Tensor | None, scale: Tensor, zero: Tensor) -> Tensor:
        low, high = -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
        scale, zero = scale[:, None], zero[:, None]
        rounded = (groups / scale).round_().add_(zero).clamp_(low, high).sub_(zero).mul_(scale)
        squared = rounded.sub_(groups).square_()
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
