"""How a Hessian factor is spread over directions, and how near two of them are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KRYLOV_STEPS = 48


@dataclass(frozen=True)
class Spread:
    """Of a symmetric PSD matrix H (n, n).

    effective_rank: tr(H)²/‖H‖²_F, n for the identity and 1 for rank one.  peak: the largest eigenvalue over the mean one;
    with damping of percdamp × the mean diagonal, the condition number is at most 1 + peak/percdamp.
    off_diagonal: the share of ‖H‖²_F that lies off the diagonal.  All 0 for H = 0.
    """

    trace: float
    effective_rank: float
    peak: float
    off_diagonal: float


@dataclass(frozen=True)
class Agreement:
    """Of two symmetric matrices, both divided by their trace, A and B then.

    difference: ‖A − B‖_F / max(‖A‖_F, ‖B‖_F).  cosine: ⟨A, B⟩ / (‖A‖_F ‖B‖_F).
    """

    difference: float
    cosine: float


def spread(H: Tensor) -> Spread:
    """See ``Spread``; sums in float64.

    >>> spread(torch.eye(3))
    Spread(trace=3.0, effective_rank=3.0, peak=1.0, off_diagonal=0.0)
    """
    H = H.to(torch.float64)
    trace, rank = float(H.trace()), effective_rank(H)
    if not rank:
        return Spread(trace, 0.0, 0.0, 0.0)
    diagonal = float(H.diagonal().square().sum() / H.square().sum())
    return Spread(trace, rank, largest_eigenvalue(H) * len(H) / trace, max(1 - diagonal, 0.0))


def effective_rank(H: Tensor) -> float:
    """tr(H)²/‖H‖²_F of the (n, n) ``H``, in float64; 0 for H = 0.

    >>> effective_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0])))
    2.6666666666666665
    """
    H = H.to(torch.float64)  # squares of small gradients vanish in float32
    square = float(H.square().sum())
    return float(H.trace()) ** 2 / square if square else 0.0


def agreement(A: Tensor, B: Tensor) -> Agreement:
    """See ``Agreement``; two zero matrices agree, and nothing agrees with one zero matrix."""
    A, B = (H.to(torch.float64) for H in (A, B))
    A, B = (H / (float(H.trace()) or 1.0) for H in (A, B))
    a, b = float(A.norm()), float(B.norm())
    if not a or not b:
        return Agreement(float(a != b), float(a == b))
    return Agreement(float((A - B).norm()) / max(a, b), float((A * B).sum()) / (a * b))


def largest_eigenvalue(H: Tensor) -> float:
    """That of the symmetric PSD float64 ``H`` (n, n), from below: the largest of a Krylov space of 48 vectors.

    Exact up to rounding for n ≤ 48, and nearly so for spectra with a tail, as Hessian factors have.
    """
    n = len(H)
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(n, generator=generator, dtype=torch.float64).to(H.device)
    basis = H.new_zeros(0, n)
    for _ in range(min(n, KRYLOV_STEPS)):
        before = float(v.norm())
        for _ in range(2):  # once is not enough in floating point
            v = v - basis.T @ (basis @ v)
        if float(v.norm()) <= 1e-10 * before:
            break  # the space is invariant, what is left are rounding errors
        basis = torch.cat([basis, v[None] / v.norm()])
        v = H @ basis[-1]
    return float(torch.linalg.eigvalsh(basis @ H @ basis.T)[-1])
