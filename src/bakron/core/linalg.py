"""Factorisation of damped Hessian factors, H = U diag(D) Uᵀ with U unit upper triangular, and its diagnosis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from bakron.core.parallel import Team, cut, pieces
from bakron.core.parallel import team as whole_team
from bakron.errors import NonFiniteError, NotPositiveDefiniteError, ShapeError

ROW_PADDING = 16
LAPACK_SIZE = 64  # where the recursion of the Cholesky factorisation ends
MAX_PERCDAMP = 1.0  # damping is never raised above this (or above the value asked for, if that is larger)


@dataclass(frozen=True)
class Factor:
    """``H + percdamp·mean(diag H)·I = U diag(D) Uᵀ``, U (n, n) unit upper triangular and D (n,) ≥ 0, both float64.

    lower: (n, n) float64, the lower Cholesky factor of the same matrix with its index reversed, which is how U is kept.
    percdamp is the damping that was used: the one asked for, or a larger one when that did not suffice.
    """

    lower: Tensor
    D: Tensor
    percdamp: float

    @cached_property
    def U(self) -> Tensor:
        """U (n, n) in float64."""
        return self.unit_upper(torch.float64)

    def unit_upper(self, dtype: torch.dtype, team: Team | None = None) -> Tensor:
        """U (n, n) in ``dtype``, its rows padded (see ``padded``)."""
        n = len(self.lower)
        U = padded(n, n, dtype, self.lower.device)
        scale = self.lower.diagonal().flip(0).to(dtype)

        def rows(a: int, b: int) -> None:
            torch.div(self.lower[n - b : n - a].to(dtype).flip(0, 1), scale, out=U[a:b])

        _run(team, [partial(rows, a, b) for a, b in _strips(n, U.is_cpu)])
        return U

    def times(self, X: Tensor) -> Tensor:
        """``X U`` (k, n) of X (k, n) in float64, by the triangle only."""
        n = X.shape[1]
        X = X.flip(1)
        edges = _edges(n)
        product = torch.cat([X[:, a:] @ self.lower[a:, a:b] for a, b in pairwise(edges)], 1)
        return product.div_(self.lower.diagonal()).flip(1)


def padded(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty matrix whose rows are not a power of two apart, so that tiles do not compete for the same cache lines."""
    return torch.empty(rows, columns + ROW_PADDING, dtype=dtype, device=device)[:, :columns]


def check_hessian(H: Tensor, size: int, name: str) -> Tensor:
    """The (size, size) factor ``H``, float32 or float64 and symmetric; ``name`` says whose it is in errors.

    Raises ShapeError (not square, wrong size, asymmetric beyond rounding) and NonFiniteError.
    """
    if H.shape != (size, size):
        raise ShapeError(
            f"{name}: expected shape ({size}, {size}) to match the weight, got {tuple(H.shape)}. "
            "H_in must be (d_in, d_in) and H_out (d_out, d_out); W is (d_out, d_in)."
        )
    H = H.detach()
    H = H if H.dtype == torch.float64 else H.to(torch.float32)
    if not _finite(H):
        bad = int((~torch.isfinite(H)).sum())
        raise NonFiniteError(
            f"{name}: {bad} of {H.numel()} entries are NaN or infinite. Usually an activation or gradient "
            "overflowed: check the model in float32 and the calibration text."
        )
    gap = _asymmetry(H)
    if gap == 0:
        return H
    largest = float(H.abs().max())
    if gap > 1e-4 * largest:
        raise ShapeError(
            f"{name}: not symmetric, largest |H - Hᵀ| is {gap:.3g} where the largest entry is {largest:.3g}. "
            "Pass the full symmetric matrix, not one triangle."
        )
    return (H + H.T) / 2


def _finite(H: Tensor) -> bool:
    """Whether no entry is NaN or infinite, in one pass and without a copy."""
    return not H.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(H))).all())


def _asymmetry(H: Tensor) -> float:
    """The largest |H − Hᵀ|, block by block: a transposed read of a whole large matrix is slow."""
    edges = range(0, len(H), 512)
    gaps = [(H[i : i + 512, j : j + 512] - H[j : j + 512, i : i + 512].T).abs().max() for i in edges for j in edges if j <= i]  # fmt: skip
    return float(torch.stack(gaps).max()) if gaps else 0.0


def shrink_to_diagonal(H: Tensor, amount: float) -> Tensor:
    """``(1 - amount)·H + amount·diag(H)``: amount 0 keeps H, 1 leaves only its diagonal."""
    return torch.lerp(H, torch.diag(H.diagonal()), amount) if amount else H


def damped(H: Tensor, percdamp: float) -> Tensor:
    """``H + percdamp·mean(diag H)·I`` of the (n, n) ``H``, n > 0, as a new matrix."""
    H = H.clone()
    H.diagonal().add_(percdamp * float(H.diagonal().mean()))
    return H


def factorise(
    H: Tensor, percdamp: float, name: str, order: Tensor | None = None, team: Team | None = None
) -> Factor:
    """Factor ``H + percdamp·mean(diag H)·I`` of the symmetric PSD (n, n) ``H`` in float64 (solver.md, section 1).

    An index-reversed Cholesky and no inverse. order: (n,) indices; the factor is that of ``H[order][:, order]``.
    If it fails, percdamp is raised tenfold, up to ``MAX_PERCDAMP``, and the value used is in the result. An all-zero H
    (nothing was ever seen) gives U = I, D = 0. Same bits for any number of threads.

    Raises NotPositiveDefiniteError, NonFiniteError.
    """
    n = H.shape[0]
    if not (0 <= percdamp < float("inf")) or not _finite(H):
        raise NonFiniteError(
            f"{name}: NaN or infinite entries, or percdamp {percdamp} that is not finite and ≥ 0."
        )
    diagonal = H.diagonal().to(torch.float64)
    mean = float(diagonal.mean()) if n else 0.0
    if not diagonal.any() and not H.any():
        identity = torch.eye(n, dtype=torch.float64, device=H.device)
        return Factor(identity, identity.new_zeros(n), percdamp)
    backwards = (torch.arange(n, device=H.device) if order is None else order).flip(0)
    tried = []
    while True:
        lower = gathered(H, backwards, backwards, torch.float64, team)
        lower.diagonal().add_(percdamp * mean)
        if _cholesky_(lower, team):
            return Factor(lower, lower.diagonal().flip(0).square(), percdamp)
        tried.append(percdamp)
        percdamp = max(10 * percdamp, 1e-8)
        if percdamp > max(MAX_PERCDAMP, tried[0]):
            least = float(torch.linalg.eigvalsh(H.to(torch.float64))[0])
            raise NotPositiveDefiniteError(
                f"{name}: not positive definite with damping {tried[0]:g} … {tried[-1]:g} × the mean diagonal "
                f"{mean:.3g}; dimension {n}, smallest eigenvalue {least:.3g}. A Hessian has none below zero: "
                "it was likely accumulated in too low a precision, or is not a sum of squares. "
                "Recompute it in float32 or raise percdamp."
            )


def gathered(X: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype, team: Team | None) -> Tensor:
    """``X[rows][:, columns]`` in ``dtype``, by strips: temporary copies of whole matrices cost more in page faults."""
    copy = torch.empty(len(rows), len(columns), dtype=dtype, device=X.device)

    def piece(a: int, b: int) -> None:
        copy[a:b] = X.index_select(0, rows[a:b]).index_select(1, columns)

    _run(team, [partial(piece, a, b) for a, b in _strips(len(rows), copy.is_cpu)])
    return copy


def _cholesky_(A: Tensor, team: Team | None) -> bool:
    """Overwrite A by its lower Cholesky factor, zeros above; False when it has none."""
    if not A.is_cpu:
        lower, failed = torch.linalg.cholesky_ex(A)
        A.copy_(lower)
        return not int(failed) and bool(torch.isfinite(A.diagonal()).all())
    if team is None:
        with whole_team() as team:
            return _cholesky_(A, team)
    done = _cholesky_lower_(A, team)
    team.run([partial(A[a:b].tril_, a) for a, b in pieces(len(A))])
    return done and bool(torch.isfinite(A.diagonal()).all())


def _cholesky_lower_(A: Tensor, team: Team) -> bool:
    """The lower triangle of ``_cholesky_`` on a CPU, by products down to small LAPACK calls."""
    n = len(A)
    if n <= LAPACK_SIZE:
        lower, failed = torch.linalg.cholesky_ex(A)
        A.copy_(lower)
        return not int(failed)
    h = _half(n)
    if not _cholesky_lower_(A[:h, :h], team):
        return False
    panel = A[h:, :h]
    team.run([partial(_divide_, panel[a:b], A[:h, :h], transposed=True) for a, b in pieces(n - h)])
    team.run(
        [
            partial(A[h + a :, h + a : h + b].addmm_, panel[a:], panel[a:b].T, alpha=-1)
            for a, b in pieces(n - h)
        ]
    )
    return _cholesky_lower_(A[h:, h:], team)


def _divide_(B: Tensor, L: Tensor, transposed: bool) -> None:
    """Overwrite B (k, n) by ``B L⁻ᵀ`` if ``transposed`` else ``B L⁻¹``, L (n, n) lower triangular."""
    n = len(L)
    if n <= LAPACK_SIZE:
        inverse = torch.linalg.solve_triangular(L, torch.eye(n, dtype=L.dtype, device=L.device), upper=False)
        B.copy_(B @ (inverse.T if transposed else inverse))
        return
    h = _half(n)
    first, second = (slice(0, h), slice(h, n)) if transposed else (slice(h, n), slice(0, h))
    _divide_(B[:, first], L[first, first], transposed)
    coupling = L[second, first].T if transposed else L[first, second]
    B[:, second].addmm_(B[:, first], coupling, alpha=-1)
    _divide_(B[:, second], L[second, second], transposed)


def _half(n: int) -> int:
    """About n/2, a multiple of LAPACK_SIZE."""
    return -(-n // LAPACK_SIZE // 2) * LAPACK_SIZE


def _edges(n: int, blocks: int = 8) -> list[int]:
    """Where to cut n columns of a triangle so that few of its zeros are multiplied."""
    return [n * i // blocks for i in range(blocks + 1)] if n >= 1024 else [0, n]


def _strips(n: int, is_cpu: bool) -> list[tuple[int, int]]:
    """Ranges of n rows that are copied on their way: on a CPU small ones, as its allocator keeps what threads once took."""
    return cut(n, 64) if is_cpu else pieces(n)


def _run(team: Team | None, tasks: list[Callable[[], object]]) -> None:
    """Do all tasks, by the team if there is one."""
    if team is not None:
        team.run(tasks)
    else:
        for task in tasks:
            task()


def solve_right(B: Tensor, H: Tensor, percdamp: float, name: str) -> Tensor:
    """``B (H + percdamp·mean(diag H)·I)⁻¹`` for B (m, n), in float64; B itself where H is all zero.

    Raises NotPositiveDefiniteError, NonFiniteError.
    """
    X = B.to(torch.float64).flip(1)
    with whole_team() as team:
        lower = factorise(H, percdamp, name, team=team).lower
        for transposed in (True, False):
            team.run([partial(_divide_, X[a:b], lower, transposed) for a, b in pieces(len(X))])
    return X.flip(1)


def over_square_norm(H: Tensor) -> Tensor:
    """``H/‖H‖²_F``, the multiple of H whose inner product with H is 1; an all-zero H stays as it is."""
    square = float(H.to(torch.float64).square().sum())
    return (H.to(torch.float64) / (square or 1.0)).to(H.dtype)


def gram(A: Tensor) -> Tensor:
    """``AᵀA`` (n, n) of A (k, n), large ones by their upper blocks only, 0.6 of the flops."""
    n = A.shape[1]
    if n < 1024:
        return A.T @ A
    H = A.new_empty(n, n)
    for start, end in pairwise(_edges(n, 4)):
        H[:end, start:end] = A[:, :end].T @ A[:, start:end]
        H[start:end, :start] = H[:start, start:end].T
    return H
