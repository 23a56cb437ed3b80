"""``shampoo``: H_in = E[GᵀG] and H_out = E[GGᵀ], G = Σ_t g_t x_tᵀ of one sequence ("Backprop-Shampoo", YAQA sketch B)."""

from __future__ import annotations

import torch
from torch import Tensor

from bakron.core.linalg import gram


class Shampoo:
    """One step of power iteration from the identity on the rearranged Fisher matrix (arXiv 2505.22988)."""

    needs_gradients = True
    shares_input = False
    per_token = False

    def terms(self, x: Tensor, g: Tensor | None, want_in: bool) -> tuple[Tensor | None, Tensor | None]:
        """GᵀG and GGᵀ of this sequence."""
        assert g is not None
        G = g.T @ x
        return (gram(G) if want_in else None), gram(G.T)

    def token_weights(self, g: Tensor | None) -> Tensor | None:
        """‖g_t‖²: GᵀG = Σ_{t,u} (g_t·g_u) x_t x_uᵀ, of which the terms t = u are kept for new inputs."""
        assert g is not None
        return g.square().sum(1)

    def fisher_scale(self, H_in: Tensor) -> float:
        """1/tr H_in = 1/E‖G‖²: H_out ⊗ H_in has the trace (E‖G‖²)², F = E[vec(G) vec(G)ᵀ] the trace E‖G‖².
        Exact where F is a Kronecker product; 0 where no gradient arrives.
        """
        size = float(H_in.diagonal().sum(dtype=torch.float64))
        return 1 / size if size > 0 else 0.0


ESTIMATOR = Shampoo()
