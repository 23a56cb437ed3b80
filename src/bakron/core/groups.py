"""What base quantizers share: column groups checked and brought to one size exactly, and a search that keeps the best candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid
from bakron.errors import ConfigError, NonFiniteError

Parameters = tuple[Tensor, ...]


@dataclass(frozen=True)
class Groups:
    """The weights of an (m, n) matrix, one line for each of its rows and column groups, k = m·n_groups lines in all.

    values: (k, size) weights times 2^−exponent, the largest magnitude of a line in [½, 1), so that squared errors
    neither overflow nor vanish; a last short group is padded with zeros.  exponent: (k,) int32.
    group: (n,) int64, column → group.  shape: (m, n_groups).
    """

    values: Tensor
    exponent: Tensor
    group: Tensor
    shape: tuple[int, int]

    def normalised(self, x: Tensor) -> Tensor:
        """``x`` (k, …), in the units of the weight, in those of ``values``."""
        return shift(x, -self._exponent_like(x))

    def restored(self, x: Tensor) -> Tensor:
        """``x`` (k, …), in the units of ``values``, in those of the weight; may underflow, or overflow."""
        return shift(x, self._exponent_like(x))

    def storable(self, scale: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The normalised ``scale`` (k,) ≥ 0 as a checkpoint will hold it in ``dtype``: never infinite or 0, 1 for 0."""
        dtype = dtype or scale.dtype
        limits = torch.finfo(dtype)
        kept = self.restored(scale).clamp(limits.tiny * limits.eps, limits.max).to(dtype)
        return torch.where(scale > 0, self.normalised(kept.to(scale.dtype)), torch.ones_like(scale))

    def error(self, levels: Tensor, scale: Tensor) -> Tensor:
        """(k,) sums of squared errors of rounding to ``scale·levels``, both normalised like ``values``."""
        line = torch.zeros(self.values.shape[1], dtype=torch.int64, device=scale.device)
        grid = ScalarGrid(levels, scale[:, None], torch.zeros_like(scale)[:, None], line)
        return (grid.values(grid.nearest(self.values)) - self.values).square().sum(1)

    def grid(self, levels: Tensor, scale: Tensor) -> ScalarGrid:
        """The grid without zeros of ``levels`` and the normalised ``scale`` (k,)."""
        scale = self.restored(scale).view(self.shape)
        return ScalarGrid(levels, scale, torch.zeros_like(scale), self.group)

    def _exponent_like(self, x: Tensor) -> Tensor:
        return self.exponent.view(-1, *[1] * (x.ndim - 1))


def split(weight: Tensor, group_size: int) -> Groups:
    """The groups of ``group_size`` columns (−1: whole rows) of ``weight`` (m, n), in float64 if it is, else float32.

    Raises NonFiniteError.
    """
    work = weight.detach().to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    if not torch.isfinite(work).all():
        raise NonFiniteError("the weight to quantize holds NaN or infinite values.")
    m, n = work.shape
    size = max(min(n, group_size) if group_size != -1 else n, 1)
    n_groups = -(-n // size)
    padded = work.new_zeros(m, n_groups * size)
    padded[:, :n] = work
    lines = padded.view(m * n_groups, size)
    exponent = torch.frexp(lines.abs().amax(1)).exponent
    group = torch.arange(n, device=work.device) // size
    return Groups(shift(lines, -exponent[:, None]), exponent, group, (m, n_groups))


def shift(x: Tensor, exponent: Tensor) -> Tensor:
    """``x·2^exponent``, exact unless it leaves the range of x's dtype (float32 or float64)."""
    half = exponent.div(2, rounding_mode="floor")  # 2^exponent alone may not be representable
    return x * _power_of_two(half, x.dtype) * _power_of_two(exponent - half, x.dtype)


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float64:
        return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def require_group_size(group_size: int) -> None:
    """Raise ConfigError unless ``group_size`` is a number of columns, or −1 for the whole row."""
    if group_size != -1 and group_size < 1:
        raise ConfigError(f"group_size: {group_size} is neither positive nor -1 (the whole row).")


def least_error(
    candidates: Iterator[Parameters], error: Callable[..., Tensor], searched: bool = True
) -> Parameters:
    """For each line the first of the ``candidates`` (tensors (k, …)) with the least ``error(*candidate)`` (k,).

    Unless ``searched``, and where there is no line, the first candidate.
    """
    best = next(candidates)
    if not searched or not best[0].numel():
        return best
    least = error(*best)
    for candidate in candidates:
        found = error(*candidate)
        better = found < least
        least = torch.where(better, found, least)
        best = tuple(
            torch.where(better.view(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip(candidate, best, strict=True)
        )
    return best
