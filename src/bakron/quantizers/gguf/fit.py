"""The scales and minima of llama.cpp's blocks, chosen as they are stored: fp16 times whole numbers of 4 to 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bakron.core.groups import Groups, least_error, split
from bakron.errors import FormatError, require_one_of
from bakron.quantizers.gguf.kinds import KINDS, GgufGrid, Kind, grid_of

SHRINKS = 5  # ends of a range tried by the search
FARTHEST_ZERO = (
    128  # levels by which a minimum may miss zero: float32 must still resolve the levels beside it
)
HALF = torch.finfo(torch.float16)
SMALLEST_HALF = 2.0**-24


class Parts(NamedTuple):
    """d, dmin: (b, 1) normalised.  sub, submin: (b, parts) whole numbers.  Of b blocks, as ``Kind`` says."""

    d: Tensor
    dmin: Tensor
    sub: Tensor
    submin: Tensor


@dataclass(frozen=True)
class Gguf:
    """The grid of one block format of llama.cpp, chosen so that the blocks hold it exactly; see ``pack``.

    kind: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K or Q6_K. The columns must be whole blocks, of 32 or,
    for K-quants, 256.
    scale: "absmax" covers the weights of each run of 16 or 32 columns, up to the rounding of its scale; "mse" searches
    for the least squared rounding error of each block.
    """

    kind: Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"] = "Q4_K"
    scale: Literal["absmax", "mse"] = "mse"

    def __post_init__(self) -> None:
        require_one_of("kind", self.kind, tuple(KINDS))
        require_one_of("scale", self.scale, ("absmax", "mse"))

    def fit(self, weight: Tensor) -> GgufGrid:
        """The grid for ``weight`` (m, n), in float64 if the weight is, else float32.

        Raises NonFiniteError; FormatError when n is not whole blocks, or a weight too large for fp16 scales.
        """
        kind = KINDS[self.kind]
        if weight.shape[1] % kind.columns:
            raise FormatError(
                f"{self.kind}: stores rows in blocks of {kind.columns} columns, the weight has {weight.shape[1]}. "
                "Use a format with smaller blocks (32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0), or leave the layer as it is."
            )
        groups = split(weight, kind.columns)
        search = _Search(kind, groups)
        if groups.values.numel():
            search.check_range(self.kind)
        candidates = search.candidates()
        best = Parts(*least_error(candidates, search.error, self.scale == "mse"))
        m, n = weight.shape
        halves = (
            groups.restored(x).view(m, n // kind.columns).to(torch.float16) for x in (best.d, best.dmin)
        )
        whole = (x.reshape(m, n // kind.size).to(torch.int16) for x in (best.sub, best.submin))
        return grid_of(self.kind, groups.values.dtype, *halves, *whole)


class _Search:
    """The candidates for all blocks of a weight at once, in normalised units; ``x`` (b, parts, size) are its weights."""

    def __init__(self, kind: Kind, groups: Groups) -> None:
        self.kind, self.groups = kind, groups
        self.x = groups.values.view(len(groups.values), kind.parts, kind.size)

    def error(self, d: Tensor, dmin: Tensor, sub: Tensor, submin: Tensor) -> Tensor:
        """(b,) sums of squared rounding errors."""
        return self._run_errors(d * sub, dmin * submin).sum(1)

    def check_range(self, name: str) -> None:
        """Raise FormatError when a block needs a scale or minimum beyond fp16."""
        scale, minimum = self._covering()
        for wanted in (scale.abs(), minimum.abs()):
            most = float(self.groups.restored(wanted.amax(1) / self.kind.sub_max).max())
            if most > HALF.max:
                raise FormatError(
                    f"{name}: weights up to {float(self.groups.restored(self.x.abs().amax((1, 2))).max()):.3g} need a "
                    f"scale or minimum of {most:.3g}, fp16 holds {HALF.max:g}. The checkpoint is likely damaged."
                )

    def candidates(self) -> Iterator[Parts]:
        """Scales that cover, as stored; then the best of every run by itself, as stored, and two refinements."""
        yield self._stored(*self._covering())
        ideal = least_error(self._run_candidates(), self._run_errors_flat)
        parts = self._stored(*(x.view(self.x.shape[:2]) for x in ideal))
        yield parts
        for _ in range(2):
            if self.kind.sub_max > 1:
                parts = self._nudged(parts)
                yield parts
            parts = self._refitted(parts)
            yield parts

    # ------------------------------------------------------------------ runs of columns that share a scale

    def _covering(self) -> tuple[Tensor, Tensor]:
        """Scale, negative where q is turned around, and minimum (both (b, parts)) that cover all weights of a run."""
        return self._reaching(*self._ends())

    def _ends(self) -> tuple[Tensor, Tensor]:
        """The least and the largest value to cover in each run; a K-quant's range includes zero."""
        least, most = self.x.amin(2), self.x.amax(2)
        if not self.kind.minimum or self.kind.sub_max > 1:
            least, most = least.clamp(max=0), most.clamp(min=0)
        return least, most

    def _reaching(self, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.kind.low, self.kind.high
        if self.kind.minimum:
            return self._spread((most - least) / high, -least), -least
        straight = torch.maximum(least / low, most / high)
        turned = torch.maximum(least / -high, most / -low)
        return torch.where(turned < straight, -turned, straight), torch.zeros_like(straight)

    def _spread(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """The scale, raised where its levels would lie too far from zero; a K-quant's last level reaches zero."""
        return torch.maximum(
            scale, minimum.abs() / (self.kind.high if self.kind.sub_max > 1 else FARTHEST_ZERO)
        )

    def _run_candidates(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Scales and minima (b·parts,) as if every number could be stored: shrunk ranges, each refitted once."""
        least, most = self._ends()
        middle = (
            (least + most) / 2 if self.kind.minimum and self.kind.sub_max == 1 else torch.zeros_like(least)
        )
        smallest = 1 - 2 / (self.kind.high - self.kind.low + 1)
        shrinks = torch.linspace(1, smallest, SHRINKS).tolist()
        for below, above in product(shrinks, shrinks):
            scale, minimum = self._reaching(
                torch.lerp(middle, least, below).contiguous(), torch.lerp(middle, most, above).contiguous()
            )
            yield scale.view(-1), minimum.view(-1)
            yield self._refitted_runs(scale, minimum)

    def _refitted_runs(self, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
        """Least squares for scale and minimum (b·parts,), given what the weights of each run round to."""
        q = self._rounded(scale, minimum)
        if not self.kind.minimum:
            new = (q * self.x).sum(2) / q.square().sum(2)
            return torch.where(torch.isfinite(new) & (new * scale > 0), new, scale).view(-1), minimum.view(-1)
        q_mean, x_mean = q.mean(2), self.x.mean(2)
        new = ((q - q_mean[..., None]) * self.x).sum(2) / (q - q_mean[..., None]).square().sum(2)
        new = torch.where(torch.isfinite(new) & (new > 0), new, scale)
        minimum = new * q_mean - x_mean
        if self.kind.sub_max > 1:
            minimum = minimum.clamp(min=0)
        return self._spread(new, minimum).view(-1), minimum.view(-1)

    def _rounded(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """The q (b, parts, size) that the weights round to."""
        position = (self.x + minimum[..., None]) / torch.where(scale == 0, 1.0, scale)[..., None]
        return position.round_().clamp_(self.kind.low, self.kind.high)

    def _run_errors(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """(b, parts) sums of squared errors."""
        q = self._rounded(scale, minimum)
        return q.mul_(scale[..., None]).sub_(minimum[..., None]).sub_(self.x).square_().sum(2)

    def _run_errors_flat(self, scale: Tensor, minimum: Tensor) -> Tensor:
        shape = self.x.shape[:2]
        return self._run_errors(scale.view(shape), minimum.view(shape)).view(-1)

    # --------------------------------------------------------------------------- blocks, as they are stored

    def _stored(self, scale: Tensor, minimum: Tensor) -> Parts:
        """The nearest storable parts for scales and minima (b, parts)."""
        most = self.kind.sub_max
        d = self._half(scale.abs().amax(1, keepdim=True) / most, positive=True)
        sub = (scale.abs() / d).round().clamp(1, most) * torch.where(scale < 0, -1.0, 1.0)
        dmin = self._half(minimum.amax(1, keepdim=True) / most, positive=False)
        submin = (minimum / torch.where(dmin == 0, 1.0, dmin)).round().clamp(0, most)
        return Parts(d, dmin, sub, torch.ones_like(submin) if most == 1 else submin)

    def _half(self, x: Tensor, positive: bool) -> Tensor:
        """``x`` (b, 1) as fp16 holds it, at least its smallest number where ``positive``, and 1 for 0."""
        limits = (SMALLEST_HALF, HALF.max) if positive else (-HALF.max, HALF.max)
        kept = self.groups.restored(x).clamp(*limits).to(torch.float16).to(x.dtype)
        kept = self.groups.normalised(kept)
        return torch.where(x > 0, kept, torch.ones_like(x)) if positive else kept

    def _nudged(self, parts: Parts) -> Parts:
        """The best of each run's whole numbers and their neighbours, d and dmin being what they are."""
        shape = parts.sub.shape

        def neighbours() -> Iterator[tuple[Tensor, Tensor]]:
            mins = (0, -1, 1) if self.kind.minimum else (0,)
            for step, min_step in product((0, -1, 1), mins):
                size = (parts.sub.abs() + step).clamp(1, self.kind.sub_max)
                submin = (parts.submin + min_step).clamp(0, self.kind.sub_max)
                yield (size * parts.sub.sign()).view(-1), submin.view(-1)

        def error(sub: Tensor, submin: Tensor) -> Tensor:
            return self._run_errors(parts.d * sub.view(shape), parts.dmin * submin.view(shape)).view(-1)

        sub, submin = (x.view(shape) for x in least_error(neighbours(), error))
        return Parts(parts.d, parts.dmin, sub, submin)

    def _refitted(self, parts: Parts) -> Parts:
        """Least squares for d and dmin, given what the weights of each block round to; rounded to fp16."""
        q = self._rounded(parts.d * parts.sub, parts.dmin * parts.submin)
        a = (q * parts.sub[..., None]).flatten(1)
        x = self.x.flatten(1)
        aa, ax = (a * a).sum(1, keepdim=True), (a * x).sum(1, keepdim=True)
        d, dmin = ax / aa, parts.dmin
        if self.kind.minimum:
            c = parts.submin.repeat_interleave(self.kind.size, 1)
            cc, ac, cx = ((c * y).sum(1, keepdim=True) for y in (c, a, x))
            determinant = aa * cc - ac * ac
            solvable = determinant > 1e-4 * aa * cc
            d = torch.where(solvable, (ax * cc - ac * cx) / determinant, d)
            dmin = torch.where(solvable, (ax * ac - aa * cx) / determinant, dmin)
            d = torch.where(solvable, d, parts.d)
        usable = torch.isfinite(d) & torch.isfinite(dmin) & (d > 0)
        if self.kind.sub_max > 1:
            usable &= dmin >= 0
        else:
            usable &= dmin.abs() <= FARTHEST_ZERO * d
        d = torch.where(usable, self._half(d, positive=True), parts.d)
        return Parts(
            d, torch.where(usable, self._half(dmin, positive=False), parts.dmin), parts.sub, parts.submin
        )
