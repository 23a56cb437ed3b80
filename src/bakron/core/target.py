"""The continuous target of a layer whose inputs have changed: aim at the outputs it had on its original inputs."""

from __future__ import annotations

from torch import Tensor

from bakron.core.linalg import check_hessian, solve_right


def aimed_weight(W: Tensor, cross: Tensor, H_in: Tensor, percdamp: float, aim: float, name: str) -> Tensor:
    """``W + aim · cross (H_in + λI)⁻¹``, the least-squares weight for outputs that moved from y to ŷ = W x̂.

    W: (d_out, d_in).  cross: (d_out, d_in) Σ_t w_t (y_t − ŷ_t) x̂_tᵀ and H_in: (d_in, d_in) Σ_t w_t x̂_t x̂_tᵀ over the
    same tokens.  λ = percdamp · mean(diag H_in).  aim 1 minimises Σ_t w_t ‖y_t − W* x̂_t‖² up to damping; less than 1
    follows less of the noise (hessians.md, "Sequential inputs"; GPTAQ and Qronos are one-sided relatives).
    Raises ShapeError, NonFiniteError, NotPositiveDefiniteError.
    """
    H_in = check_hessian(H_in, W.shape[1], f"{name}: H_in")
    return W + aim * solve_right(cross, H_in, percdamp, f"{name}: H_in").to(W.dtype)
