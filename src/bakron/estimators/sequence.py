"""``sequence``: power iteration for the best Kronecker product, on gradients of whole sequences (YAQA's sketch B)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bakron.core.linalg import over_square_norm


@dataclass(frozen=True)
class SequenceFisher:
    """H_in ← E[GᵀH_out G]/‖H_out‖²_F and H_out ← E[G H_in Gᵀ]/‖H_in‖²_F in turns from H_out = I, G = Σ_t g_t x_tᵀ.

    The first step is ``shampoo``'s H_in.  Each step is the least-squares fit of H_out ⊗ H_in to the Fisher matrix
    F = E[vec(G) vec(G)ᵀ] with the other factor kept, so the product has the scale of F, per sequence (arXiv 2505.22988).
    Repeated, the pair becomes the leading singular pair of F rearranged to (d_out² × d_in²).

    metric_in, metric_out: the factor of one side over its squared norm, in the step to the other side.
    """

    metric_in: Tensor | None = None
    metric_out: Tensor | None = None
    needs_gradients = True
    shares_input = False
    per_token = False
    passes = 3

    def after(self, done: int, H_in: Tensor, H_out: Tensor | None) -> SequenceFisher:
        """H_out and H_in in turns."""
        if done % 2:
            return SequenceFisher(metric_in=over_square_norm(H_in))
        assert H_out is not None
        return SequenceFisher(metric_out=over_square_norm(H_out))

    def terms(self, x: Tensor, g: Tensor | None, want_in: bool) -> tuple[Tensor | None, Tensor | None]:
        """G H_in Gᵀ / ‖H_in‖²_F for H_out, or GᵀH_out G / ‖H_out‖²_F for H_in."""
        assert g is not None
        G = g.T @ x
        if self.metric_in is not None:
            return None, G @ self.metric_in @ G.T
        return (G.T @ self._to_metric(G) if want_in else None), None

    def token_weights(self, g: Tensor | None) -> Tensor | None:
        """g_tᵀ H_out g_t / ‖H_out‖²_F: of GᵀH_out G the terms of one token, kept for new inputs; none in a step to H_out."""
        assert g is not None
        return None if self.metric_in is not None else (g * self._to_metric(g.T).T).sum(1).clamp(min=0)

    def fisher_scale(self, H_in: Tensor) -> float:
        """1: each step fits the scale of F per sequence."""
        return 1.0

    def _to_metric(self, columns: Tensor) -> Tensor:
        """H_out/‖H_out‖²_F times ``columns`` (d_out, n)."""
        return columns / len(columns) if self.metric_out is None else self.metric_out @ columns


ESTIMATOR = SequenceFisher()
