"""The two-sided Hessian of one linear layer, H ≈ H_out ⊗ H_in, and the loss that it defines."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KroneckerHessian:
    """H_in (d_in, d_in) and H_out (d_out, d_out), symmetric PSD; None stands for the identity.

    n_sequences and n_tokens say how much data is behind them (0 when unknown).  error_out: relative error of H_out that
    comes from so few sequences (``bakron.core.noise.relative_error``), None when unknown.
    """

    H_in: Tensor | None
    H_out: Tensor | None
    n_sequences: int = 0
    n_tokens: int = 0
    error_out: float | None = None

    def loss(self, E: Tensor) -> float:
        """f(E) = tr(H_out E H_in Eᵀ) of the (d_out, d_in) error (solver.md, section 1).

        Products in E's dtype if that is float64, else in float32; their sum in float64.
        """
        E = E.detach() if E.dtype == torch.float64 else E.detach().to(torch.float32)
        size = float(E.abs().max()) if E.numel() else 0.0
        E = E / (size or 1.0)  # its square may not fit in float32
        right = E if self.H_in is None else E @ self.H_in.to(E.dtype)
        left = E if self.H_out is None else self.H_out.to(E.dtype) @ E
        return float(right.mul_(left).sum(dtype=torch.float64)) * size**2
