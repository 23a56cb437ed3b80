"""The continuous target of a layer whose inputs have changed: move its weight so that its outputs make up for it."""

from __future__ import annotations

import torch
from torch import Tensor

from bakron.core.linalg import check_hessian, solve_right
from bakron.errors import NonFiniteError


def aimed_weight(W: Tensor, cross: Tensor, H_in: Tensor, percdamp: float, aim: float, name: str) -> Tensor:
    """``W + aim · cross (H_in + λ diag H_in)⁻¹``: least squares for outputs that miss their goal by r_t = goal − W x̂_t.

    W: (d_out, d_in).  cross: (d_out, d_in) Σ_t w_t r_t x̂_tᵀ and H_in: (d_in, d_in) Σ_t w_t x̂_t x̂_tᵀ over the same
    tokens.  λ = percdamp, relative to each input's own size: a few inputs are thousands of times larger than the others in
    some layers, and damping by the mean would leave the others out and refit the few at will.  aim 1 minimises
    Σ_t w_t ‖r_t − (W* − W) x̂_t‖² up to damping; less than 1, or more damping, follows
    less of the noise. (GPTAQ and Qronos are one-sided relatives, with the layer's own original output as the goal.)
    Raises ShapeError, NonFiniteError, NotPositiveDefiniteError.
    """
    if cross.shape != W.shape or not bool(torch.isfinite(cross).all()):
        raise NonFiniteError(
            f"{name}: the {tuple(cross.shape)} correlation of missed outputs and inputs holds NaN or infinities, or is not "
            f"{tuple(W.shape)}: the model overflows on the calibration text; use dtype float32."
        )
    H_in = check_hessian(H_in, W.shape[1], f"{name}: H_in").to(torch.float64)
    size = H_in.diagonal().clamp(min=0).sqrt()
    size = torch.where(size > 0, size, 1.0)  # an input that was never seen has no correlation either
    step = solve_right(cross / size, H_in / size / size[:, None], percdamp, f"{name}: H_in") / size
    return W + aim * step.to(W.dtype)
