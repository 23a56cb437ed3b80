"""Hessian estimators, one module each; a module's name is the estimator's name in the configuration.

A module defines ``ESTIMATOR``. The collector calls it once for each linear layer and calibration sequence, and adds
up the terms in float64; no estimator sees a model or a file. ``Iterated`` ones need several passes, ``Local`` ones
see the other activations and weights of the block.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

from torch import Tensor

from bakron.core.view import BlockView
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


@runtime_checkable
class Iterated(Estimator, Protocol):
    """An estimator of several passes over the same sequences and labels; it is itself the one of the first pass.

    passes: how many.  All passes after the first have gradients.
    """

    passes: int

    def after(self, done: int, H_in: Tensor, H_out: Tensor | None) -> Estimator:
        """What one linear sums in the pass that follows ``done`` passes, whose latest means these factors are.

        A factor of which the next pass has no term stays as it is.
        """
        ...


@runtime_checkable
class Local(Estimator, Protocol):
    """An estimator that sees, of one sequence, more of the block than one linear: the ``sees`` parts of a view."""

    sees: tuple[str, ...]

    def of(self, view: BlockView, name: str) -> Estimator:
        """What the linear ``name`` sums for this sequence."""
        ...


@runtime_checkable
class Fisher(Estimator, Protocol):
    """An estimator whose factors, of gradients of the model's own loss, have a known scale.

    With labels drawn from the model, ½ vec(E)ᵀ F vec(E) is the KL divergence that an error E of the weight makes, up to
    third order, F being the Fisher matrix: per token if ``per_token``, else summed over the tokens of a sequence.
    """

    def fisher_scale(self, H_in: Tensor) -> float:
        """c such that c · H_out ⊗ H_in is the estimate of F; H_in: the mean, undamped."""
        ...


def number_of_passes(estimator: Estimator) -> int:
    """How many passes over the calibration text ``estimator`` makes."""
    return estimator.passes if isinstance(estimator, Iterated) else 1


def uses_gradients(estimator: Estimator) -> bool:
    """Whether any pass of ``estimator`` needs gradients."""
    return estimator.needs_gradients or number_of_passes(estimator) > 1


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
