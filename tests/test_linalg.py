"""Claims: H + λ·mean(diag H)·I = U diag(D) Uᵀ; λ is raised within bounds and reported; bad input is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import HESSIANS, random_hessian

from bakron.core.linalg import MAX_PERCDAMP, check_hessian, factorise, shrink_to_diagonal, solve_right
from bakron.errors import NonFiniteError, NotPositiveDefiniteError, ShapeError

properties = settings(deadline=None, derandomize=True, max_examples=40)
seeds = st.integers(0, 2**32 - 1)


def hessian(seed: int, size: int, kind: str) -> torch.Tensor:
    return torch.from_numpy(random_hessian(np.random.default_rng(seed), size, kind))


def with_eigenvalue(least: float, size: int = 6) -> torch.Tensor:
    """A symmetric matrix with a diagonal of ones whose smallest eigenvalue is ``least``."""
    off = torch.ones(size, size, dtype=torch.float64) - torch.eye(
        size, dtype=torch.float64
    )  # eigenvalues −1, size−1
    return torch.eye(size, dtype=torch.float64) + (1 - least) * off


@pytest.fixture
def cholesky_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets one element for each Cholesky factorisation."""
    calls: list[int] = []
    original = torch.linalg.cholesky_ex

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
    return calls


@properties
@given(seeds, st.integers(0, 20), st.sampled_from(HESSIANS), st.sampled_from([0.003, 0.01, 0.5, 3.0]))
def test_factors_multiply_to_the_damped_hessian(seed: int, size: int, kind: str, percdamp: float) -> None:
    H = hessian(seed, size, kind)
    factor = factorise(H, percdamp, "H")
    assert factor.percdamp == percdamp
    assert factor.U.dtype == factor.D.dtype == torch.float64
    assert torch.equal(factor.U, factor.U.triu()) and bool((factor.U.diagonal() == 1).all())
    assert bool((factor.D > 0).all())
    damped = H + percdamp * (H.trace() / max(size, 1)) * torch.eye(size, dtype=torch.float64)
    product = factor.U @ torch.diag(factor.D) @ factor.U.T
    assert torch.allclose(product, damped, rtol=0, atol=1e-12 * float(damped.abs().max()) if size else 0)


def test_no_damping_is_added_to_a_positive_definite_matrix() -> None:
    H = hessian(1, 9, "full")
    factor = factorise(H, 0.0, "H")
    assert factor.percdamp == 0
    assert torch.allclose(factor.U @ torch.diag(factor.D) @ factor.U.T, H, rtol=1e-12)


def test_the_input_is_left_alone() -> None:
    H = hessian(2, 7, "low-rank")
    before = H.clone()
    factorise(H, 0.1, "H")
    check_hessian(H, 7, "H")
    shrink_to_diagonal(H, 0.5)
    assert torch.equal(H, before)


def test_singular_matrix_without_damping_gets_a_little_and_says_so() -> None:
    v = torch.arange(1.0, 6.0, dtype=torch.float64)
    H = torch.outer(v, v)
    factor = factorise(H, 0.0, "H")
    assert 0 < factor.percdamp <= 1e-6
    damped = H + factor.percdamp * H.diagonal().mean() * torch.eye(5, dtype=torch.float64)
    assert torch.allclose(factor.U @ torch.diag(factor.D) @ factor.U.T, damped, rtol=1e-9)


def test_damping_is_raised_tenfold_until_it_suffices(cholesky_calls: list[int]) -> None:
    factor = factorise(with_eigenvalue(-0.05), 0.001, "H")  # 0.001 and 0.01 fail, 0.1 is enough
    assert factor.percdamp == pytest.approx(0.1)
    assert len(cholesky_calls) == 3
    assert bool((factor.D > 0).all())


@pytest.mark.parametrize("percdamp, attempts", [(0.01, 3), (0.0, 10), (2 * MAX_PERCDAMP, 1)])
def test_raising_stops_at_the_bound_with_a_named_error(
    percdamp: float, attempts: int, cholesky_calls: list[int]
) -> None:
    with pytest.raises(NotPositiveDefiniteError, match="layer 3: H_out") as caught:
        factorise(with_eigenvalue(-50.0), percdamp, "layer 3: H_out")
    assert len(cholesky_calls) <= attempts
    assert "-50" in str(caught.value) and "percdamp" in str(caught.value)


def test_a_negative_diagonal_is_an_error_not_a_repair() -> None:
    with pytest.raises(NotPositiveDefiniteError):
        factorise(-torch.eye(4, dtype=torch.float64), 0.01, "H")


def test_a_hessian_of_zeros_factors_to_the_identity() -> None:
    factor = factorise(torch.zeros(5, 5, dtype=torch.float64), 0.01, "H")
    assert torch.equal(factor.U, torch.eye(5, dtype=torch.float64))
    assert not factor.D.any()


@properties
@given(seeds, st.integers(3, 12))
def test_dead_entries_are_coupled_to_nothing(seed: int, size: int) -> None:
    H = hessian(seed, size, "full")
    dead = seed % size
    H[dead] = H[:, dead] = 0
    U = factorise(H, 0.01, "H").U
    unit = torch.zeros(size, dtype=torch.float64)
    unit[dead] = 1
    assert torch.equal(U[dead], unit) and torch.equal(U[:, dead], unit)


@properties
@given(seeds, st.integers(0, 9), st.integers(1, 12), st.sampled_from(HESSIANS), st.sampled_from([0.01, 1.0]))
def test_solve_right_inverts_the_damped_hessian(
    seed: int, m: int, n: int, kind: str, percdamp: float
) -> None:
    H = hessian(seed, n, kind)
    B = torch.from_numpy(np.random.default_rng(seed).standard_normal((m, n)))
    X = solve_right(B, H, percdamp, "H")
    damped = H + percdamp * H.diagonal().mean() * torch.eye(n, dtype=torch.float64)
    assert X.shape == B.shape
    assert torch.allclose(X @ damped, B, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("amount", [0.0, 0.25, 1.0])
def test_shrinking_scales_only_what_is_off_the_diagonal(amount: float) -> None:
    H = hessian(3, 6, "full")
    shrunk = shrink_to_diagonal(H, amount)
    off = ~torch.eye(6, dtype=torch.bool)
    assert torch.allclose(shrunk.diagonal(), H.diagonal(), rtol=1e-15)
    assert torch.allclose(shrunk[off], (1 - amount) * H[off], rtol=1e-14, atol=0)


@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (3, 3), (4,), (1, 4, 4), (0, 0)])
def test_a_wrong_shape_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"layer 3: H_in.*\(4, 4\)") as caught:
        check_hessian(torch.ones(shape), 4, "layer 3: H_in")
    assert str(tuple(shape)) in str(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_entry_is_named_and_counted(bad: float) -> None:
    H = torch.eye(4)
    H[1, 2] = H[2, 1] = bad
    with pytest.raises(NonFiniteError, match="layer 3: H_in: 2 of 16"):
        check_hessian(H, 4, "layer 3: H_in")


def test_one_triangle_is_refused() -> None:
    with pytest.raises(ShapeError, match="layer 3: H_in: not symmetric"):
        check_hessian(hessian(4, 6, "full").triu(), 6, "layer 3: H_in")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rounding_asymmetry_is_accepted_and_removed(dtype: torch.dtype) -> None:
    H = hessian(5, 6, "full").to(dtype)
    if dtype != torch.bfloat16:
        H[0, 1] *= 1 + 1e-6
    checked = check_hessian(H, 6, "H")
    assert checked.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert torch.equal(checked, checked.T)
    assert torch.allclose(checked.double(), H.double(), rtol=1e-5)


@pytest.mark.parametrize("n", [63, 64, 65, 200, 1100])
def test_factor_is_that_of_the_ordered_matrix_whatever_the_number_of_threads(n: int) -> None:
    H = hessian(n, n, "full")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    threads = torch.get_num_threads()
    factors = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            factors.append(factorise(H, 0.01, "H", order))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(factor.lower, factors[0].lower) for factor in factors)
    U, D = factors[0].U, factors[0].D
    damped = H[order][:, order] + 0.01 * H.diagonal().mean() * torch.eye(n, dtype=H.dtype)
    assert float((U * D @ U.T - damped).abs().max()) < 1e-10 * float(damped.max())
    X = torch.randn(3, n, dtype=H.dtype, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(factors[0].times(X), X @ U, rtol=1e-9, atol=1e-9)
    assert torch.equal(factors[0].unit_upper(torch.float32).tril(), torch.eye(n))


def test_solving_from_the_right_inverts_the_damped_matrix() -> None:
    H = hessian(0, 150, "full")
    B = torch.randn(7, 150, dtype=H.dtype, generator=torch.Generator().manual_seed(0))
    damped = H + 0.1 * H.diagonal().mean() * torch.eye(150, dtype=H.dtype)
    assert torch.allclose(solve_right(B, H, 0.1, "H") @ damped, B, rtol=1e-8, atol=1e-8)
    assert torch.equal(solve_right(B, torch.zeros_like(H), 0.1, "H"), B)
