"""Base quantizers, one module each; a module's name is the quantizer's name.

A module defines ``QUANTIZER``, a class of settings whose ``fit(weight)`` gives the grid that a solver rounds on.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

from torch import Tensor

from bakron.core.grid import ScalarGrid
from bakron.errors import ConfigError


class Quantizer(Protocol):
    """Anything that chooses the grid of a weight before it is solved."""

    def fit(self, weight: Tensor) -> ScalarGrid:
        """The frozen grid for ``weight`` (d_out, d_in)."""
        ...


@runtime_checkable
class Weighted(Quantizer, Protocol):
    """A quantizer whose ``fit`` also takes what a squared error costs in each column, where its scale is "hessian"."""

    scale: str

    def fit(self, weight: Tensor, column_weights: Tensor | None = None) -> ScalarGrid:
        """The frozen grid for ``weight`` (d_out, d_in); column_weights: (d_in,)."""
        ...


@runtime_checkable
class Refittable(Weighted, Protocol):
    """A quantizer whose scales may be anything that can be stored, so that they can follow the codes after rounding."""

    def storable(self, scale: Tensor) -> Tensor:
        """The nearest scales to ``scale`` (m, n_groups), none 0, that a checkpoint can hold, in the same dtype."""
        ...


def storable(quantizer: Quantizer) -> Callable[[Tensor], Tensor] | None:
    """What rounds the quantizer's scales after a refit in the Hessian's metric; None if it wants none, or has no say."""
    refitted = isinstance(quantizer, Refittable) and quantizer.scale == "hessian"
    return quantizer.storable if refitted else None


def fitted(quantizer: Quantizer, weight: Tensor, column_weights: Callable[[], Tensor | None]) -> ScalarGrid:
    """The quantizer's grid for ``weight``; column_weights is called only if the quantizer asks for them."""
    if isinstance(quantizer, Weighted) and quantizer.scale == "hessian":
        return quantizer.fit(weight, column_weights())
    return quantizer.fit(weight)


def quantizer_names() -> list[str]:
    """The names of all quantizers: this package's modules and the entry points of group ``bakron.quantizers``."""
    own = [module.name for module in pkgutil.iter_modules(__path__)]
    return sorted([*own, *(point.name for point in entry_points(group="bakron.quantizers"))])


def get_quantizer(name: str) -> type[Quantizer]:
    """The class of the quantizer called ``name``, whose settings are its arguments. Raises ConfigError."""
    if name in {module.name for module in pkgutil.iter_modules(__path__)}:
        return importlib.import_module(f"{__name__}.{name}").QUANTIZER
    for point in entry_points(group="bakron.quantizers", name=name):
        return point.load()
    raise ConfigError(f"quantizer: {name!r} is not one of {', '.join(quantizer_names())}.")
