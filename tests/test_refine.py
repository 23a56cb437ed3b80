"""Claims: coordinate descent makes the moves of its own definition, never raises f, ends where no single move lowers it,
and leaves a weight on the grid, the certificate and the damping of the sweep alone; the grid, too, unless scales may follow.

There is no symmetry under transposition to test: a pass goes column by column, so W and Wᵀ are visited differently.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle import (
    GRIDS,
    HESSIANS,
    Array,
    Case,
    code_values,
    damped,
    quadratic_form,
    random_case,
    round_to_nearest,
)

from bakron.core.hessian import KroneckerHessian
from bakron.core.refine import MARGIN, PanelKernel, descend, refined
from bakron.core.solution import LayerProblem, Solution, solve_problem
from bakron.errors import ConfigError
from bakron.kernels import get_kernel, get_panel_kernel
from bakron.quantizers.integer import Integer

CPU = torch.device("cpu")
KERNELS: dict[str, PanelKernel] = {
    name: importlib.import_module(f"bakron.kernels.{name}").descend_panel for name in ("numba", "torch")
}
STORABLE = Integer(scale="hessian", scale_dtype=torch.bfloat16).storable
DAMP_IN, DAMP_OUT = 0.02, 0.3

properties = settings(deadline=None, derandomize=True, max_examples=30)
cases = st.builds(
    random_case,
    st.integers(0, 2**32 - 1),
    st.integers(1, 8),
    st.integers(1, 9),
    st.sampled_from([grid for grid in GRIDS if grid != "wide"]),
    st.sampled_from([1, 3, 100]),
    st.sampled_from(HESSIANS),
    st.sampled_from(HESSIANS),
)
kernels = st.sampled_from(sorted(KERNELS))


def descended(
    case: Case, codes: NDArray[np.int64], sweeps: int, kernel: str = "numba", panel: int = 4
) -> tuple[NDArray[np.int64], int]:
    """Codes and moves of ``descend`` on the undamped factors of ``case``."""
    start = torch.from_numpy(codes.astype(np.int16))
    H_in, H_out = case.tensor("H_in"), case.tensor("H_out")
    _, found, moves = descend(case.tensor("W"), case.grid, start, H_in, H_out, sweeps, KERNELS[kernel], panel)
    return found.numpy().astype(np.int64), moves


def swept(case: Case, dtype: torch.dtype = torch.float64) -> Solution:
    hessian = KroneckerHessian(case.tensor("H_in"), case.tensor("H_out"))
    problem = LayerProblem("layer 3", case.tensor("W").to(dtype), hessian, DAMP_IN, DAMP_OUT)
    return solve_problem(problem, case.grid.to(dtype), "both", get_kernel("numba", CPU))


def loss(case: Case, codes: NDArray[np.int64], H_in: Array, H_out: Array) -> float:
    return quadratic_form(code_values(case, codes) - case.W, H_in, H_out)


def naive(case: Case, codes: NDArray[np.int64], sweeps: int) -> tuple[NDArray[np.int64], int]:
    """Coordinate descent on the dense (mn, mn) Hessian: of all values an entry may take, the one of least f."""
    m, n = case.W.shape
    H = np.kron(case.H_out, case.H_in)
    codes, moves = codes.copy(), 0
    for _ in range(sweeps):
        for j in range(n):
            for i in range(m):
                q = i * n + j
                error = (code_values(case, codes) - case.W).reshape(-1)
                step = case.values[i, j] - case.values[i, j, codes[i, j] - case.first_code]
                change = 2 * step * (H[q] @ error) + step**2 * H[q, q]
                best = int(np.argmin(change))
                if change[best] < -1e-9 * H[q, q]:
                    codes[i, j], moves = best + case.first_code, moves + 1
    return codes, moves


# ------------------------------------------------------------------------------------------- the moves


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("panel", [1, 3, 64])
@properties
@given(case=cases, sweeps=st.integers(1, 3))
def test_moves_are_those_of_a_dense_descent_in_the_same_order(
    kernel: str, panel: int, case: Case, sweeps: int
) -> None:
    start = round_to_nearest(case)
    expected, moves = naive(case, start, sweeps)
    found, n_moves = descended(case, start, sweeps, kernel, panel)
    assert np.array_equal(found, expected) and n_moves == moves


@properties
@given(cases, kernels)
def test_where_it_ends_no_single_move_lowers_the_loss(case: Case, kernel: str) -> None:
    codes, _ = descended(case, round_to_nearest(case), 200, kernel)
    least = loss(case, codes, case.H_in, case.H_out)
    scale = loss(case, 0 * codes, case.H_in, case.H_out)
    for i, j in np.ndindex(*codes.shape):
        for index in range(case.values.shape[2]):
            moved = codes.copy()
            moved[i, j] = index + case.first_code
            assert loss(case, moved, case.H_in, case.H_out) >= least - 1e-7 * scale
    assert descended(case, codes, 1, kernel) == (pytest.approx(codes), 0)


@pytest.mark.parametrize("dtype", MARGIN)
@properties
@given(case=cases, sweeps=st.integers(1, 4))
def test_the_damped_loss_never_rises_and_codes_stay_in_range(
    dtype: torch.dtype, case: Case, sweeps: int
) -> None:
    H_in, H_out = damped(case.H_in, DAMP_IN), damped(case.H_out, DAMP_OUT)
    before = swept(case, dtype)
    after = refined(before, sweeps, get_panel_kernel(CPU))
    codes = [x.codes.numpy().astype(np.int64) for x in (before, after)]
    first, second = (loss(case, c, H_in, H_out) for c in codes)
    assert second <= first * (1 + 1e-5)
    assert codes[1].min() >= case.first_code
    assert codes[1].max() < case.first_code + case.values.shape[2]
    expected = code_values(case, codes[1])
    assert np.allclose(after.weight.numpy(), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_it_gains_on_the_sweep() -> None:
    ratios = []
    for seed in range(5):
        case = random_case(seed, 24, 40, "clipped", in_kind="outliers", out_kind="low-rank")
        before = swept(case)
        ratios.append(refined(before, 2, get_panel_kernel(CPU)).loss / before.loss)
    assert np.mean(ratios) < 0.9


def test_a_descent_that_does_not_lower_the_loss_is_thrown_away() -> None:
    case = random_case(1, 6, 8)
    start = torch.from_numpy(round_to_nearest(case).astype(np.int16))

    def careless(panel: object) -> int:
        panel.codes.fill_(-8)  # type: ignore[attr-defined]
        return panel.codes.numel()  # type: ignore[attr-defined]

    grid, codes, moves = descend(
        case.tensor("W"), case.grid, start, case.tensor("H_in"), case.tensor("H_out"), 1, careless
    )
    assert torch.equal(codes, start) and moves == 0 and grid is case.grid


# ----------------------------------------------------------------------------------------- fixed points


@properties
@given(cases, kernels)
def test_a_weight_on_the_grid_is_left_alone(case: Case, kernel: str) -> None:
    codes = round_to_nearest(case)
    on_grid = Case(code_values(case, codes), case.H_in, case.H_out, case.grid, case.values)
    found, moves = descended(on_grid, codes, 2, kernel)
    assert moves == 0 and np.array_equal(found, codes)


@pytest.mark.parametrize("kernel", KERNELS)
def test_round_to_nearest_is_a_fixed_point_without_factors(kernel: str) -> None:
    case = random_case(2, 7, 9)
    codes = torch.from_numpy(round_to_nearest(case).astype(np.int16))
    spoilt = codes.clone()
    spoilt[3, 5] += 1
    for start in (codes, spoilt):
        _, found, moves = descend(case.tensor("W"), case.grid, start, None, None, 3, KERNELS[kernel], 4)
        assert torch.equal(found, codes) and moves == int((start != codes).sum())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("side", ["H_in", "H_out"])
def test_a_missing_factor_stands_for_the_identity(kernel: str, side: str) -> None:
    case = random_case(3, 7, 9)
    start = torch.from_numpy(round_to_nearest(case).astype(np.int16))
    factors = {"H_in": case.tensor("H_in"), "H_out": case.tensor("H_out")}
    identity = torch.eye(len(factors[side]), dtype=torch.float64)
    results = [
        descend(case.tensor("W"), case.grid, start, **factors | {side: H}, sweeps=3, kernel=KERNELS[kernel])
        for H in (None, identity)
    ]
    assert torch.equal(results[0][1], results[1][1]) and results[0][2] == results[1][2] > 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_weights_that_nothing_depends_on_do_not_move(kernel: str) -> None:
    case = random_case(4, 7, 9)
    H_in, H_out = case.H_in.copy(), case.H_out.copy()
    H_in[[2, 5]] = H_in[:, [2, 5]] = H_out[3] = H_out[:, 3] = 0
    case = Case(case.W, H_in, H_out, case.grid, case.values)
    start = round_to_nearest(case)
    found, moves = descended(case, start, 5, kernel)
    assert moves > 0
    assert np.array_equal(found[:, [2, 5]], start[:, [2, 5]]) and np.array_equal(found[3], start[3])


@pytest.mark.parametrize("m, n", [(0, 5), (5, 0), (1, 1), (1, 6), (6, 1)])
def test_single_and_empty_rows_and_columns(m: int, n: int) -> None:
    solution = swept(random_case(5, m, n))
    after = refined(solution, 3, get_panel_kernel(CPU))
    assert after.codes.shape == (m, n) and after.loss <= solution.loss * (1 + 1e-9)


# ------------------------------------------------------------------------------------------ scales that follow


@properties
@given(case=cases.filter(lambda case: case.grid.offset is None), sweeps=st.integers(1, 4))
def test_scales_that_follow_are_storable_keep_their_signs_and_never_raise_the_loss(
    case: Case, sweeps: int
) -> None:
    H_in, H_out = damped(case.H_in, DAMP_IN), damped(case.H_out, DAMP_OUT)
    before = swept(case)
    after = refined(before, sweeps, get_panel_kernel(CPU), STORABLE)
    changed = after.grid.scale != before.grid.scale
    assert torch.equal(after.grid.scale[changed], STORABLE(after.grid.scale)[changed])
    assert bool((after.grid.scale * before.grid.scale > 0).all())
    assert torch.equal(after.grid.zero, before.grid.zero) and after.fitted is before.grid
    losses = [quadratic_form(x.weight.double().numpy() - case.W, H_in, H_out) for x in (before, after)]
    assert losses[1] <= losses[0] * (1 + 1e-9)
    assert torch.equal(after.weight, after.grid.values(after.codes))


def test_scales_that_follow_gain_on_codes_alone() -> None:
    ratios = []
    for seed in range(5):
        case = random_case(seed, 24, 40, "clipped", 8, in_kind="outliers", out_kind="low-rank")
        before = swept(case)
        alone, both = (refined(before, 4, get_panel_kernel(CPU), *how) for how in ((), (STORABLE,)))
        ratios.append(both.loss / alone.loss)
        assert both.loss_rtn == before.loss_rtn and both.loss_gptq == before.loss_gptq
    assert np.mean(ratios) < 0.95


# ------------------------------------------------------------------------------------------ the solution


def test_the_sweeps_certificate_is_kept_and_what_depends_on_codes_is_renewed() -> None:
    case = random_case(6, 12, 17, "clipped", 5)
    before = swept(case)
    first = before.loss
    after = refined(before, 4, get_panel_kernel(CPU))
    assert not torch.equal(after.codes, before.codes)
    assert torch.equal(after.weight, before.grid.values(after.codes))
    assert (after.certificate, after.damping) == (before.certificate, before.damping)
    assert after.loss != before.loss == first and after.loss_rtn == before.loss_rtn
    assert after.clip_rate == pytest.approx(float(((after.codes == -2) | (after.codes == 1)).double().mean()))


def test_shrinkage_is_part_of_the_metric() -> None:
    case = random_case(7, 10, 14)
    hessian = KroneckerHessian(case.tensor("H_in"), case.tensor("H_out"))
    problem = LayerProblem("layer 3", case.tensor("W"), hessian, DAMP_IN, DAMP_OUT, 0.6)
    solution = solve_problem(problem, case.grid, "both", get_kernel("numba", CPU))
    H_out = damped(0.4 * case.H_out + 0.6 * np.diag(np.diag(case.H_out)), DAMP_OUT)
    metric = Case(case.W, damped(case.H_in, DAMP_IN), H_out, case.grid, case.values)
    expected, _ = naive(metric, solution.codes.numpy().astype(np.int64), 2)
    assert np.array_equal(refined(solution, 2, get_panel_kernel(CPU)).codes.numpy(), expected)


def test_no_sweeps_change_nothing_and_a_negative_number_is_refused() -> None:
    solution = swept(random_case(8, 6, 7))
    assert refined(solution, 0, get_panel_kernel(CPU)) is solution
    with pytest.raises(ConfigError, match="sweeps: -1"):
        refined(solution, -1, get_panel_kernel(CPU))
