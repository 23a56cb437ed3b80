"""Claims: a refit lowers the two-sided loss and finds the best scales where they do not interact; refits lead to the best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Array, Case, code_values, damped, quadratic_form, random_case, round_to_nearest

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


def refitted(case: Case, steps: int = 1) -> Array:
    """The scales after so many refits to the nearest codes."""
    codes = torch.from_numpy(round_to_nearest(case).astype(np.int16))
    H_in, H_out = case.tensor("H_in"), case.tensor("H_out")
    grid = case.grid
    for _ in range(steps):
        grid = replace(grid, scale=refit_scales(case.tensor("W"), grid, codes, H_in, H_out))
    return grid.scale.numpy()


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
@given(cases, st.integers(0, 4))
def test_each_refit_lowers_the_loss(case: Case, steps: int) -> None:
    fewer, more = (loss(case, refitted(case, k)) for k in (steps, steps + 1))
    assert more <= fewer * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_refits_lead_to_dense_least_squares(seed: int) -> None:
    case = regular(random_case(seed, 5, 12, "symmetric", 3))
    first, least = loss(case, case.grid.scale.numpy()), least_loss(case)
    assert loss(case, refitted(case, 1)) - least < 0.5 * (first - least)
    assert loss(case, refitted(case, 200)) == pytest.approx(least, rel=1e-4)


def test_one_refit_is_enough_where_nothing_interacts() -> None:
    case = regular(random_case(0, 6, 20, "asymmetric", 4, out_kind="diagonal"))
    apart = np.arange(20)[:, None] // 4 == np.arange(20)[None] // 4
    case = Case(case.W, case.H_in * apart, np.eye(6), case.grid, case.values)
    assert loss(case, refitted(case)) == pytest.approx(least_loss(case), rel=1e-6)


def test_what_says_nothing_of_a_scale_leaves_it_alone() -> None:
    """Codes that all stand for 0, inputs that never come, outputs that nothing depends on; and a weight on the grid."""
    case = regular(random_case(1, 5, 12, "symmetric", 4))
    case.W[2, 4:8] = 0
    case.H_in[8:] = case.H_in[:, 8:] = case.H_out[3] = case.H_out[:, 3] = 0
    scale, before = refitted(case, 20), case.grid.scale.numpy()
    assert scale[2, 1] == before[2, 1] and np.array_equal(scale[:, 2], before[:, 2])
    assert np.array_equal(scale[3], before[3]) and not np.array_equal(scale, before)
    codes = round_to_nearest(case)
    on_grid = Case(code_values(case, codes), case.H_in, case.H_out, case.grid, case.values)
    assert np.allclose(refitted(on_grid), before, rtol=1e-12)


def test_missing_factors_stand_for_the_identity() -> None:
    case = random_case(2, 5, 12, "symmetric", 4)
    W, grid, C = case.tensor("W"), case.grid, units(case).reshape(5, 3, 4)
    codes = torch.from_numpy(round_to_nearest(case).astype(np.int16))
    expected = (C * case.W.reshape(5, 3, 4)).sum(2) / (C**2).sum(2)
    assert np.allclose(refit_scales(W, grid, codes, None, None).numpy(), expected, rtol=1e-5)
