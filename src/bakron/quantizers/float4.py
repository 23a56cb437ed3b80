"""Four-bit floats (E2M1) with block scales that are floats of eight bits: MXFP4 and NVFP4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid
from bakron.core.groups import least_error, split
from bakron.errors import FormatError, require_one_of

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1
E4M3_MAX = 448.0
EXPONENTS = (-126, 125)  # of MXFP4's scales here: those for which scale and 6·scale are normal float32
LARGEST_WEIGHT = 1e38  # beyond it values could overflow float32


@dataclass(frozen=True, kw_only=True)
class Float4Grid(ScalarGrid):
    """The grid, and the scales as compressed-tensors stores them: scale = block_scale (/ global_scale).

    block_scale: (m, n_groups), for NVFP4 float8_e4m3fn; for MXFP4 uint8 exponents, scale = 2^(block_scale − 127).
    global_scale: float32 of one entry, or None for MXFP4; scale is the quotient in float32.
    """

    block_scale: Tensor
    global_scale: Tensor | None


@dataclass(frozen=True)
class Float4:
    """Codes 0 to 14 for the levels −6, −4, −3, −2, −1.5, −1, −0.5, 0, 0.5, … 6, value = scale·level.

    block: "nv" is NVFP4, 16 columns share an E4M3 scale, over one float32 scale of the whole weight; "mx" is MXFP4,
    32 columns share a power of two. A last short group is allowed.
    scale: "absmax" brings the largest magnitude of a group to 6 (mx: as near below as powers of two allow); "mse"
    takes of all storable scales around it the one of least squared rounding error.
    """

    block: Literal["nv", "mx"] = "nv"
    scale: Literal["absmax", "mse"] = "mse"

    def __post_init__(self) -> None:
        require_one_of("block", self.block, ("nv", "mx"))
        require_one_of("scale", self.scale, ("absmax", "mse"))

    def fit(self, weight: Tensor) -> Float4Grid:
        """The grid for ``weight`` (m, n), in float64 if the weight is, else float32.

        Raises NonFiniteError; FormatError when a weight is beyond 1e38.
        """
        groups = split(weight, 16 if self.block == "nv" else 32)
        largest = groups.restored(groups.values.abs().amax(1))
        if largest.numel() and float(largest.max()) > LARGEST_WEIGHT:
            raise FormatError(
                f"the weight to quantize reaches {float(largest.max()):.3g}: four-bit floats have scales and values in "
                f"float32 and hold at most {LARGEST_WEIGHT:g}. The checkpoint is likely damaged."
            )
        levels = torch.tensor([-x for x in MAGNITUDES[:0:-1]] + list(MAGNITUDES)).to(groups.values)
        stored = _E4M3Scales(largest) if self.block == "nv" else _PowerScales(largest)

        def error(index: Tensor) -> Tensor:
            scale = groups.normalised(stored.scale(index).to(levels.dtype))
            return groups.error(levels, scale.clamp(max=torch.finfo(scale.dtype).max))

        candidates = self._candidates(stored)
        (index,) = least_error(candidates, error, self.scale == "mse")
        scale = stored.scale(index).to(levels.dtype).view(groups.shape)
        return Float4Grid(
            levels,
            scale,
            torch.zeros_like(scale),
            groups.group,
            block_scale=stored.stored(index).view(groups.shape),
            global_scale=stored.global_scale,
        )

    def _candidates(self, stored: _E4M3Scales | _PowerScales) -> Iterator[tuple[Tensor]]:
        """The position of absmax's scale among the storable ones, then those of its neighbours."""
        for step in (0, *stored.steps):
            yield ((stored.absmax + step).clamp(0, stored.last),)


class _E4M3Scales:
    """NVFP4's storable scales for groups of the ``largest`` magnitudes (k,), by their position among E4M3 numbers.

    The scale of the whole weight lets the largest group use E4M3's largest number (as compressed-tensors does).
    """

    steps = range(-7, 7)  # eight numbers a factor of two: from half the scale to nearly twice
    last = 125

    def __init__(self, largest: Tensor) -> None:
        most = (
            largest.max().to(torch.float32) if largest.numel() else largest.new_zeros((), dtype=torch.float32)
        )
        limit = torch.finfo(torch.float32)
        scale = (E4M3_MAX * MAGNITUDES[-1] / most).clamp(limit.tiny, limit.max)
        self.global_scale = torch.where(most > 0, scale, torch.ones_like(scale)).view(1)
        positive = torch.arange(1, self.last + 2, dtype=torch.uint8, device=largest.device)
        self._numbers = positive.view(torch.float8_e4m3fn)
        wanted = (largest.to(torch.float32) / MAGNITUDES[-1]) * self.global_scale
        nearest = wanted.clamp(float(self._numbers[0]), E4M3_MAX).to(torch.float8_e4m3fn)
        position = nearest.view(torch.uint8).to(torch.int64) - 1
        self.absmax = torch.where(largest > 0, position, self.last)

    def stored(self, index: Tensor) -> Tensor:
        return self._numbers.view(torch.uint8)[index].view(torch.float8_e4m3fn)

    def scale(self, index: Tensor) -> Tensor:
        return self._numbers.to(torch.float32)[index] / self.global_scale


class _PowerScales:
    """MXFP4's storable scales for groups of the ``largest`` magnitudes (k,), by their exponent."""

    steps = range(-2, 2)
    last = EXPONENTS[1] - EXPONENTS[0]
    global_scale = None

    def __init__(self, largest: Tensor) -> None:
        mantissa, exponent = torch.frexp(largest)  # the least 2^e with 6·2^e ≥ largest
        covering = exponent.to(torch.int64) - torch.where(mantissa <= 0.75, 3, 2)
        self.absmax = torch.where(largest > 0, covering - EXPONENTS[0], -EXPONENTS[0]).clamp(0, self.last)

    def stored(self, index: Tensor) -> Tensor:
        return (index + EXPONENTS[0] + 127).to(torch.uint8)

    def scale(self, index: Tensor) -> Tensor:
        return ((index + EXPONENTS[0] + 127).to(torch.int32) << 23).view(torch.float32)


QUANTIZER = Float4
