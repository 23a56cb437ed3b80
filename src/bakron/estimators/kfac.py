"""``kfac``: H_in = E[xxᵀ] and H_out = E[ggᵀ] over tokens (K-FAC; "Backprop-KFAC" in arXiv 2608.06291)."""

from __future__ import annotations

from torch import Tensor

from bakron.core.linalg import gram


class Kfac:
    """Exact where x and g are independent and tokens do not interact."""

    needs_gradients = True
    shares_input = True
    per_token = True

    def terms(self, x: Tensor, g: Tensor | None, want_in: bool) -> tuple[Tensor | None, Tensor | None]:
        """Σ_t x_t x_tᵀ and Σ_t g_t g_tᵀ."""
        assert g is not None
        return (gram(x) if want_in else None), gram(g)

    def token_weights(self, g: Tensor | None) -> Tensor | None:
        """All tokens weigh the same: H_in does not know the gradients."""
        return None

    def fisher_scale(self, H_in: Tensor) -> float:
        """1: E[ggᵀ] ⊗ E[xxᵀ] is F per token, where x and g are independent and tokens do not interact."""
        return 1.0


ESTIMATOR = Kfac()
