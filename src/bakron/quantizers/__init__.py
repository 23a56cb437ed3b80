"""Base quantizers, one module each: objects whose ``fit(weight)`` gives the grid that a solver rounds on."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bakron.core.grid import ScalarGrid


class Quantizer(Protocol):
    """Anything that chooses the grid of a weight before it is solved."""

    def fit(self, weight: Tensor, column_weights: Tensor | None = None) -> ScalarGrid:
        """The frozen grid for ``weight`` (d_out, d_in); column_weights (d_in,) say what a squared error in each costs."""
        ...
