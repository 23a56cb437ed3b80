"""``gram``: H_in = E[xxᵀ] over tokens and H_out = I, the Hessian of GPTQ."""

from __future__ import annotations

from torch import Tensor

from bakron.core.linalg import gram


class Gram:
    """Forward passes only."""

    needs_gradients = False
    shares_input = True
    per_token = True

    def terms(self, x: Tensor, g: Tensor | None, want_in: bool) -> tuple[Tensor | None, Tensor | None]:
        """Σ_t x_t x_tᵀ, and nothing for H_out."""
        return (gram(x) if want_in else None), None

    def token_weights(self, g: Tensor | None) -> Tensor | None:
        """All tokens weigh the same."""
        return None


ESTIMATOR = Gram()
