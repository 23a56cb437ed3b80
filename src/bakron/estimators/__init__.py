"""Hessian estimators, one module each; a module's name is the estimator's name in the configuration.

A module defines ``ESTIMATOR``. The collector calls it once for each linear layer and calibration sequence, and adds
up the terms in float64; no estimator sees a model or a file.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import Protocol

from torch import Tensor

from bakron.errors import ConfigError


class Estimator(Protocol):
    """How inputs x (T, d_in) and output gradients g (T, d_out) of one sequence enter H_in and H_out.

    needs_gradients: whether g is needed; without it g is None.
    shares_input: H_in depends on x alone, so layers with the same input share it.
    per_token: the sums are divided by tokens (else by sequences) in the end.
    """

    needs_gradients: bool
    shares_input: bool
    per_token: bool

    def terms(self, x: Tensor, g: Tensor | None, want_in: bool) -> tuple[Tensor | None, Tensor | None]:
        """This sequence's float32 terms of H_in (d_in, d_in) and H_out (d_out, d_out); None is no term (identity).

        The H_in term may be left out when not ``want_in``.
        """
        ...

    def token_weights(self, g: Tensor | None) -> Tensor | None:
        """(T,) weights of this sequence's tokens in an H_in taken from other inputs, e.g. a quantized prefix's."""
        ...


def estimator_names() -> list[str]:
    """The names of all estimators: this package's modules and the entry points of group ``bakron.estimators``."""
    own = [module.name for module in pkgutil.iter_modules(__path__)]
    return sorted([*own, *(point.name for point in entry_points(group="bakron.estimators"))])


def get_estimator(name: str) -> Estimator:
    """The estimator called ``name``. Raises ConfigError."""
    if name in {module.name for module in pkgutil.iter_modules(__path__)}:
        return importlib.import_module(f"{__name__}.{name}").ESTIMATOR
    for point in entry_points(group="bakron.estimators", name=name):
        return point.load()
    raise ConfigError(f"estimator: {name!r} is not one of {', '.join(estimator_names())}.")
