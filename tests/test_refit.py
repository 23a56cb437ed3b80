"""Claims: refitted scales are the dense least-squares solution in the two-sided metric, and fewer iterations never hurt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Array, Case, damped, quadratic_form, random_case, round_to_nearest

from bakron.core.refit import refit_scales

properties = settings(deadline=None, derandomize=True, max_examples=40)
cases = st.builds(
    random_case,
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.integers(1, 12),
    st.sampled_from(["symmetric", "asymmetric", "clipped", "nf4"]),
    st.sampled_from([1, 3, 5, 100]),
    st.sampled_from(["full", "low-rank", "outliers"]),
    st.sampled_from(["full", "low-rank", "outliers", "diagonal"]),
)


def regular(case: Case) -> Case:
    """The case with damped factors."""
    return Case(case.W, damped(case.H_in, 0.02), damped(case.H_out, 0.3), case.grid, case.values)


def refitted(case: Case, iterations: int) -> Array:
    codes = torch.from_numpy(round_to_nearest(case).astype(np.int16))
    H_in, H_out = case.tensor("H_in"), case.tensor("H_out")
    return refit_scales(case.tensor("W"), case.grid, codes, H_in, H_out, iterations).numpy()


def units(case: Case) -> Array:
    """level − zero of the nearest codes, (m, n)."""
    levels, zero = case.grid.levels.numpy(), case.grid.zero.numpy()[:, case.grid.group.numpy()]
    return levels[round_to_nearest(case) - case.first_code] - zero


def loss(case: Case, scale: Array) -> float:
    E = scale[:, case.grid.group.numpy()] * units(case) - case.W
    return quadratic_form(E, case.H_in, case.H_out)


def least_loss(case: Case) -> float:
    """By dense least squares: vec(scale·C) = A vec(scale), weighted with a root of kron(H_out, H_in)."""
    (m, n), group = case.W.shape, case.grid.group.numpy()
    A = np.zeros((m, n, m, group[-1] + 1))
    for i, j in np.ndindex(m, n):
        A[i, j, i, group[j]] = units(case)[i, j]
    root = np.linalg.cholesky(np.kron(case.H_out, case.H_in)).T
    best = np.linalg.lstsq(root @ A.reshape(m * n, -1), root @ case.W.reshape(-1), rcond=None)[0]
    return loss(case, best.reshape(m, -1))


@properties
@given(cases)
def test_the_scales_are_those_of_dense_least_squares(case: Case) -> None:
    case = regular(case)
    least, zero = least_loss(case), loss(case, 0 * case.grid.scale.numpy())
    assert loss(case, refitted(case, 100)) <= least + 1e-6 * zero


@properties
@given(cases, st.integers(0, 6))
def test_each_iteration_lowers_the_loss(case: Case, iterations: int) -> None:
    case = regular(case)
    fewer, more = (loss(case, refitted(case, k)) for k in (iterations, iterations + 1))
    assert more <= fewer * (1 + 1e-9) + 1e-12


def test_one_iteration_is_enough_when_rows_do_not_interact() -> None:
    case = regular(random_case(0, 6, 20, "symmetric", 4, out_kind="diagonal"))
    assert loss(case, refitted(case, 1)) == pytest.approx(least_loss(case), rel=1e-4)


def test_a_group_of_zeros_keeps_its_scale() -> None:
    case = regular(random_case(1, 5, 12, "symmetric", 4))
    case.W[2, 4:8] = 0
    scale = refitted(case, 20)
    assert scale[2, 1] == pytest.approx(float(case.grid.scale[2, 1]), abs=1e-9) and np.isfinite(scale).all()


def test_missing_factors_stand_for_the_identity() -> None:
    case = random_case(2, 5, 12, "symmetric", 4)
    W, grid, C = case.tensor("W"), case.grid, units(case).reshape(5, 3, 4)
    codes = torch.from_numpy(round_to_nearest(case).astype(np.int16))
    expected = (C * case.W.reshape(5, 3, 4)).sum(2) / (C**2).sum(2)
    assert np.allclose(refit_scales(W, grid, codes, None, None).numpy(), expected, rtol=1e-5)
