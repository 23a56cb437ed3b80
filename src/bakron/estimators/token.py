"""``token``: power iteration for the best Kronecker product, tokens taken as independent (YAQA's sketch A)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bakron.core.linalg import gram, over_square_norm


class Token:
    """H_in = E[xxᵀ]; then H_out ← E[(xᵀH_in x) ggᵀ]/‖H_in‖²_F; then H_in ← E[(gᵀH_out g) xxᵀ]/‖H_out‖²_F, over tokens.

    Each step is the least-squares fit of H_out ⊗ H_in to F = E[ggᵀ ⊗ xxᵀ] with the other factor kept, so the product
    has the scale of F, the Fisher matrix per token where tokens do not interact (arXiv 2505.22988).  Repeated, the
    pair becomes the leading singular pair of F rearranged to (d_out² × d_in²).
    """

    needs_gradients = False
    shares_input = True
    per_token = True
    passes = 3

    def terms(self, x: Tensor, g: Tensor | None, want_in: bool) -> tuple[Tensor | None, Tensor | None]:
        """Σ_t x_t x_tᵀ."""
        return (gram(x) if want_in else None), None

    def token_weights(self, g: Tensor | None) -> Tensor | None:
        """None: a later pass has them."""
        return None

    def after(self, done: int, H_in: Tensor, H_out: Tensor | None) -> _Step:
        """H_out and H_in in turns."""
        if done % 2:
            return _Step(metric_in=over_square_norm(H_in))
        assert H_out is not None
        return _Step(metric_out=over_square_norm(H_out))

    def fisher_scale(self, H_in: Tensor) -> float:
        """1: each step fits the scale of F per token."""
        return 1.0


@dataclass(frozen=True)
class _Step:
    """The step to the side whose metric is None; the other side's is its factor over its squared norm."""

    metric_in: Tensor | None = None
    metric_out: Tensor | None = None
    needs_gradients = True
    shares_input = False
    per_token = True

    def terms(self, x: Tensor, g: Tensor | None, want_in: bool) -> tuple[Tensor | None, Tensor | None]:
        """Σ_t (x_tᵀ H_in x_t) g_t g_tᵀ / ‖H_in‖²_F for H_out, or Σ_t (g_tᵀ H_out g_t) x_t x_tᵀ / ‖H_out‖²_F for H_in."""
        assert g is not None
        if self.metric_in is not None:
            return None, gram(g * _energies(x, self.metric_in).sqrt()[:, None])
        weights = self.token_weights(g)
        return (gram(x * weights.sqrt()[:, None]) if want_in and weights is not None else None), None

    def token_weights(self, g: Tensor | None) -> Tensor | None:
        """g_tᵀ H_out g_t / ‖H_out‖²_F, which give new inputs exactly the H_in of this step; none in a step to H_out."""
        return None if self.metric_out is None or g is None else _energies(g, self.metric_out)


def _energies(v: Tensor, H: Tensor) -> Tensor:
    """v_tᵀ H v_t (T,) of the rows of v, negative rounding errors cut off."""
    return ((v @ H) * v).sum(1).clamp(min=0)


ESTIMATOR = Token()
