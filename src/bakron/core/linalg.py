"""Factorisation of damped Hessian factors, H = U diag(D) Uᵀ with U unit upper triangular, and its diagnosis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bakron.errors import NonFiniteError, NotPositiveDefiniteError, ShapeError

MAX_PERCDAMP = 1.0  # damping is never raised above this (or above the value asked for, if that is larger)


@dataclass(frozen=True)
class Factor:
    """``H + percdamp·mean(diag H)·I = U diag(D) Uᵀ``: U (n, n) float64 unit upper triangular, D (n,) float64 ≥ 0.

    percdamp is the damping that was used: the one asked for, or a larger one when that did not suffice.
    """

    U: Tensor
    D: Tensor
    percdamp: float


def check_hessian(H: Tensor, size: int, name: str) -> Tensor:
    """The symmetric float64 copy of the (size, size) factor ``H``; ``name`` says whose it is in errors.

    Raises ShapeError (not square, wrong size, asymmetric beyond rounding) and NonFiniteError.
    """
    if H.shape != (size, size):
        raise ShapeError(
            f"{name}: expected shape ({size}, {size}) to match the weight, got {tuple(H.shape)}. "
            "H_in must be (d_in, d_in) and H_out (d_out, d_out); W is (d_out, d_in)."
        )
    H = H.detach().to(torch.float64)
    if not torch.isfinite(H).all():
        bad = int((~torch.isfinite(H)).sum())
        raise NonFiniteError(
            f"{name}: {bad} of {H.numel()} entries are NaN or infinite. Usually an activation or gradient "
            "overflowed: check the model in float32 and the calibration text."
        )
    largest = float(H.abs().max()) if size else 0.0
    gap = float((H - H.T).abs().max()) if size else 0.0
    if gap > 1e-4 * largest:
        raise ShapeError(
            f"{name}: not symmetric, largest |H - Hᵀ| is {gap:.3g} where the largest entry is {largest:.3g}. "
            "Pass the full symmetric matrix, not one triangle."
        )
    return (H + H.T) / 2


def shrink_to_diagonal(H: Tensor, amount: float) -> Tensor:
    """``(1 - amount)·H + amount·diag(H)``: amount 0 keeps H, 1 leaves only its diagonal."""
    return torch.lerp(H, torch.diag(H.diagonal()), amount)


def factorise(H: Tensor, percdamp: float, name: str) -> Factor:
    """Factor ``H + percdamp·mean(diag H)·I`` of the symmetric PSD float64 (n, n) ``H`` (solver.md, section 1).

    An index-reversed Cholesky and no inverse. If it fails, percdamp is raised tenfold, up to ``MAX_PERCDAMP``,
    and the value used is in the result. An all-zero H (nothing was ever seen) gives U = I, D = 0.

    Raises NotPositiveDefiniteError, NonFiniteError.
    """
    n = H.shape[0]
    if not (0 <= percdamp < float("inf")) or not bool(torch.isfinite(H).all()):
        raise NonFiniteError(
            f"{name}: NaN or infinite entries, or percdamp {percdamp} that is not finite and ≥ 0."
        )
    mean = float(H.diagonal().mean()) if n else 0.0
    if not H.any():
        return Factor(torch.eye(n, dtype=H.dtype, device=H.device), H.new_zeros(n), percdamp)
    tried = []
    while True:
        reversed_H = H.flip(0, 1)
        reversed_H.diagonal().add_(percdamp * mean)
        lower, failed = torch.linalg.cholesky_ex(reversed_H)
        if not int(failed) and bool(torch.isfinite(lower).all()):
            break
        tried.append(percdamp)
        percdamp = max(10 * percdamp, 1e-8)
        if percdamp > max(MAX_PERCDAMP, tried[0]):
            least = float(torch.linalg.eigvalsh(H)[0])
            raise NotPositiveDefiniteError(
                f"{name}: not positive definite with damping {tried[0]:g} … {tried[-1]:g} × the mean diagonal "
                f"{mean:.3g}; dimension {n}, smallest eigenvalue {least:.3g}. A Hessian has none below zero: "
                "it was likely accumulated in too low a precision, or is not a sum of squares. "
                "Recompute it in float32 or raise percdamp."
            )
    upper = lower.flip(0, 1)
    d = upper.diagonal()
    return Factor(upper / d, d.square(), percdamp)


def solve_right(B: Tensor, H: Tensor, percdamp: float, name: str) -> Tensor:
    """``B (H + percdamp·mean(diag H)·I)⁻¹`` for B (m, n), in float64; B itself where H is all zero.

    Raises NotPositiveDefiniteError, NonFiniteError.
    """
    factor = factorise(H, percdamp, name)
    D = torch.where(factor.D > 0, factor.D, 1.0)
    Z = torch.linalg.solve_triangular(factor.U.T, B.to(torch.float64), upper=False, left=False)
    return torch.linalg.solve_triangular(factor.U, Z / D, upper=True, left=False)


def over_square_norm(H: Tensor) -> Tensor:
    """``H/‖H‖²_F``, the multiple of H whose inner product with H is 1; an all-zero H stays as it is."""
    square = float(H.to(torch.float64).square().sum())
    return (H.to(torch.float64) / (square or 1.0)).to(H.dtype)


def gram(A: Tensor) -> Tensor:
    """``AᵀA`` (n, n) of A (k, n), large ones by their upper blocks only, 0.6 of the flops."""
    n = A.shape[1]
    blocks = 4 if n >= 1024 else 1
    if blocks == 1:
        return A.T @ A
    edges = [n * i // blocks for i in range(blocks + 1)]
    H = A.new_empty(n, n)
    for start, end in zip(edges, edges[1:], strict=False):
        H[:end, start:end] = A[:, :end].T @ A[:, start:end]
        H[start:end, :start] = H[:start, start:end].T
    return H
