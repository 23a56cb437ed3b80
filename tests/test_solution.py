"""Claims: act-order is undone, losses and damping are reported as they are, the certificate accepts honest
float32 and refuses a wrong code, and bad input to ``bakron.solve`` is an error that names layer and factor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import (
    GRIDS,
    HESSIANS,
    Case,
    code_values,
    damped,
    descending,
    gptq,
    obs,
    quadratic_form,
    random_case,
    random_hessian,
    round_to_nearest,
)

import bakron
from bakron.core.grid import ScalarGrid
from bakron.core.hessian import KroneckerHessian
from bakron.core.solution import ActOrder, Certificate, LayerProblem, Solution, solve_problem
from bakron.core.solver import Sweep, TileKernel
from bakron.errors import BakronError, ConfigError, NonFiniteError, NotPositiveDefiniteError, ShapeError
from bakron.kernels import get_kernel, kernel_names
from bakron.quantizers.integer import Integer

CPU = torch.device("cpu")
KERNELS = [name for name in kernel_names() if name != "triton"]
ACT_ORDERS: tuple[ActOrder, ...] = ("none", "in", "out", "both")
DAMP_IN, DAMP_OUT = 0.02, 0.3

properties = settings(deadline=None, derandomize=True, max_examples=25)
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 11)
grids = st.sampled_from(GRIDS)
kinds = st.sampled_from(HESSIANS)
cases = st.builds(random_case, seeds, sizes, sizes, grids, st.sampled_from([1, 3, 4, 100]), kinds, kinds)


def problem_of(case: Case, dtype: torch.dtype = torch.float64, **changes: Any) -> LayerProblem:
    hessian = KroneckerHessian(case.tensor("H_in"), case.tensor("H_out"))
    settings = {"percdamp_in": DAMP_IN, "percdamp_out": DAMP_OUT} | changes
    return LayerProblem("layer 3", case.tensor("W").to(dtype), hessian, **settings)


def solved(
    case: Case, act_order: ActOrder = "both", kernel: str = "numba", tile: int = 4, **changes: Any
) -> Solution:
    return solve_problem(problem_of(case, **changes), case.grid, act_order, get_kernel(kernel, CPU), tile)


def small() -> dict[str, Any]:
    """Good arguments of ``bakron.solve`` for a 4×6 matrix."""
    case = random_case(0, 4, 6)
    return {
        "W": case.tensor("W"),
        "H_in": case.tensor("H_in"),
        "H_out": case.tensor("H_out"),
        "name": "layer 3",
    }


# ------------------------------------------------------------------------------------------- act-order


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("act_order", ACT_ORDERS)
@properties
@given(case=cases)
def test_act_order_is_a_dense_schedule_with_every_group_where_it_was(
    kernel: str, act_order: ActOrder, case: Case
) -> None:
    H_in, H_out = damped(case.H_in, DAMP_IN), damped(case.H_out, DAMP_OUT)
    rows = descending(case.H_out) if act_order in ("out", "both") else range(len(H_out))
    columns = descending(case.H_in) if act_order in ("in", "both") else range(len(H_in))
    expected = obs(case, H_in, H_out, [(i, j) for i in rows for j in columns])
    solution = solved(case, act_order, kernel)
    assert np.array_equal(solution.codes.numpy(), expected)
    assert np.allclose(solution.weight.numpy(), code_values(case, expected), rtol=1e-15, atol=0)


@pytest.mark.parametrize("act_order", ACT_ORDERS)
def test_reference_kernel_gives_the_codes_of_the_sweep(act_order: ActOrder) -> None:
    case = random_case(1, 9, 13, "nf4", 4, out_kind="outliers")
    reference = solve_problem(problem_of(case), case.grid, act_order, None)
    assert torch.equal(reference.codes, solved(case, act_order).codes)
    assert reference.certificate.worst < 1e-9


def test_equal_diagonals_keep_their_order() -> None:
    case = random_case(2, 20, 30)
    H_in, H_out = (H / np.sqrt(np.outer(np.diag(H), np.diag(H))) for H in (case.H_in, case.H_out))
    for H in (H_in, H_out):
        np.fill_diagonal(H, 1.0)
    case = Case(case.W, H_in, H_out, case.grid, case.values)
    assert torch.equal(solved(case, "both").codes, solved(case, "none").codes)


def test_act_order_on_both_sides_lowers_the_loss() -> None:
    losses = dict.fromkeys(ACT_ORDERS, 0.0)
    for seed in range(6):
        case = random_case(seed, 24, 40, in_kind="outliers", out_kind="outliers")
        for order in ACT_ORDERS:
            losses[order] += solved(case, order).loss / solved(case, "none").loss
    assert losses["both"] < min(losses["in"], losses["out"]) and losses["out"] < losses["none"]


# --------------------------------------------------------------------------------------- special cases


@properties
@given(cases)
def test_diagonal_output_factor_gives_gptq_with_act_order(case: Case) -> None:
    case = Case(case.W, case.H_in, np.diag(np.diag(case.H_out)), case.grid, case.values)
    expected = gptq(case, damped(case.H_in, DAMP_IN), descending(case.H_in))
    for order in ("in", "both"):
        assert np.array_equal(solved(case, order).codes.numpy(), expected)


@pytest.mark.parametrize("changes", [{"shrink_out": 1.0}, {"percdamp_out": 1e14}])
def test_regularising_the_output_factor_away_gives_gptq(changes: dict[str, Any]) -> None:
    case = random_case(3, 14, 17)
    expected = gptq(case, damped(case.H_in, DAMP_IN), descending(case.H_in))
    assert not np.array_equal(solved(case, "in").codes.numpy(), expected)
    assert np.array_equal(solved(case, "in", **changes).codes.numpy(), expected)


def test_shrinking_is_applied_to_the_factor_before_damping() -> None:
    case = random_case(4, 9, 12)
    H_out = 0.6 * case.H_out + 0.4 * np.diag(np.diag(case.H_out))
    expected = obs(case, damped(case.H_in, DAMP_IN), damped(H_out, DAMP_OUT))
    assert np.array_equal(solved(case, "none", shrink_out=0.4).codes.numpy(), expected)


@pytest.mark.parametrize("kernel", [*KERNELS, "auto", "reference"])
def test_missing_factors_stand_for_the_identity(kernel: str) -> None:
    case = random_case(5, 11, 9)
    given = {"W": case.tensor("W"), "quantizer": Integer(3, 4), "kernel": kernel}
    identity_in, identity_out = torch.eye(9), torch.eye(11)
    nothing = bakron.solve(given.pop("W"), None, **given)
    assert torch.equal(nothing.codes, nothing.grid.nearest(case.tensor("W")))
    assert nothing.loss == nothing.loss_rtn == nothing.loss_gptq
    both = bakron.solve(case.tensor("W"), identity_in, identity_out, **given)
    assert torch.equal(both.codes, nothing.codes)
    one = bakron.solve(case.tensor("W"), case.tensor("H_in"), **given)
    assert torch.equal(
        one.codes, bakron.solve(case.tensor("W"), case.tensor("H_in"), identity_out, **given).codes
    )
    other = bakron.solve(case.tensor("W"), None, case.tensor("H_out"), **given)
    assert torch.equal(
        other.codes, bakron.solve(case.tensor("W"), identity_in, case.tensor("H_out"), **given).codes
    )


# ------------------------------------------------------------------------------- dead rows and columns


def with_dead(case: Case, rows: list[int], columns: list[int]) -> Case:
    H_in, H_out = case.H_in.copy(), case.H_out.copy()
    for H, dead in ((H_in, columns), (H_out, rows)):
        H[dead] = H[:, dead] = 0
    return Case(case.W, H_in, H_out, case.grid, case.values)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("act_order", ACT_ORDERS)
def test_a_dead_column_is_rounded_to_nearest_and_disturbs_no_other(kernel: str, act_order: ActOrder) -> None:
    case = with_dead(random_case(6, 9, 12, out_kind="diagonal"), [], [3, 7])
    codes = solved(case, act_order, kernel).codes.numpy()
    assert np.array_equal(codes[:, [3, 7]], round_to_nearest(case)[:, [3, 7]])
    alive = [j for j in range(12) if j not in (3, 7)]
    moved = Case(case.W.copy(), case.H_in, case.H_out, case.grid, case.values)
    moved.W[:, [3, 7]] = 0.123
    assert np.array_equal(solved(moved, act_order, kernel).codes.numpy()[:, alive], codes[:, alive])


@pytest.mark.parametrize("kernel", KERNELS)
def test_dead_rows_and_columns_follow_the_damped_factors(kernel: str) -> None:
    """A dead row is coupled to no other row: GPTQ on its own. A dead column likewise, along H_out."""
    case = with_dead(random_case(7, 9, 12), [2, 5], [3, 7])
    H_in, H_out = damped(case.H_in, DAMP_IN), damped(case.H_out, DAMP_OUT)
    codes = solved(case, "none", kernel).codes.numpy()
    assert np.array_equal(codes, obs(case, H_in, H_out))
    assert np.array_equal(codes[[2, 5]], gptq(case, H_in)[[2, 5]])
    transposed = Case(case.W.T, H_out, H_in, case.grid, case.values.transpose(1, 0, 2))
    assert np.array_equal(codes[:, [3, 7]], gptq(transposed, H_out).T[:, [3, 7]])
    assert np.array_equal(codes[np.ix_([2, 5], [3, 7])], round_to_nearest(case)[np.ix_([2, 5], [3, 7])])


@pytest.mark.parametrize("percdamp", [0.0, 0.01])
def test_dead_entries_without_damping_are_no_error(percdamp: float) -> None:
    case = with_dead(random_case(8, 6, 9), [1], [2])
    solution = solved(case, percdamp_in=percdamp, percdamp_out=percdamp)
    assert solution.certificate.worst < 1e-9
    assert all(0 < used <= 0.01 for used in solution.damping)


@pytest.mark.parametrize("kernel", KERNELS)
def test_output_factor_of_zeros_gives_gptq_and_all_zeros_gives_round_to_nearest(kernel: str) -> None:
    case = random_case(9, 8, 11, "clipped")
    case = Case(case.W, case.H_in, np.zeros((8, 8)), case.grid, case.values)
    expected = gptq(case, damped(case.H_in, DAMP_IN), descending(case.H_in))
    assert np.array_equal(solved(case, "both", kernel).codes.numpy(), expected)
    case = Case(case.W, np.zeros((11, 11)), np.zeros((8, 8)), case.grid, case.values)
    solution = solved(case, "both", kernel)
    assert np.array_equal(solution.codes.numpy(), round_to_nearest(case))
    assert solution.loss == 0 and np.isfinite(solution.certificate).all()


@pytest.mark.parametrize("m, n", [(1, 1), (1, 40), (40, 1), (0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("kernel", [*KERNELS, "reference"])
def test_single_and_empty_rows_and_columns(m: int, n: int, kernel: str) -> None:
    case = random_case(10, m, n)
    solution = bakron.solve(
        case.tensor("W"), case.tensor("H_in"), case.tensor("H_out"), Integer(3, 8), kernel=kernel
    )
    assert solution.codes.shape == solution.weight.shape == (m, n)
    assert solution.certificate.worst <= 1e-9
    assert 0 <= solution.loss < float("inf") and 0 <= solution.clip_rate <= 1
    assert np.isfinite([solution.loss_rtn, solution.loss_gptq]).all()


# --------------------------------------------------------------------------------------------- reports


@properties
@given(cases, st.sampled_from([0.0, 0.5]))
def test_losses_are_those_of_the_undamped_unshrunk_hessian(case: Case, shrink: float) -> None:
    solution = solved(case, "both", shrink_out=shrink)

    def loss(codes: np.ndarray) -> float:
        return quadratic_form(code_values(case, codes) - case.W, case.H_in, case.H_out)

    gptq_codes = gptq(case, damped(case.H_in, DAMP_IN), descending(case.H_in))
    assert solution.loss == pytest.approx(loss(solution.codes.numpy().astype(np.int64)), rel=1e-9)
    assert solution.loss_rtn == pytest.approx(loss(round_to_nearest(case)), rel=1e-9)
    assert solution.loss_gptq == pytest.approx(loss(gptq_codes), rel=1e-9)


def test_two_sides_beat_one_and_one_beats_none() -> None:
    ratios = []
    for seed in range(6):
        solution = solved(random_case(seed, 24, 32), percdamp_out=0.02)
        ratios.append((solution.loss / solution.loss_gptq, solution.loss_gptq / solution.loss_rtn))
    assert (np.mean(ratios, axis=0) < 0.7).all()


def test_clip_rate_counts_codes_at_the_ends() -> None:
    case = random_case(11, 12, 15, "clipped")
    solution = solved(case)
    ends = (solution.codes == -2) | (solution.codes == 1)
    assert solution.clip_rate == pytest.approx(float(ends.double().mean()))
    assert solved(random_case(11, 12, 15, "wide")).clip_rate == 0


def test_damping_asked_for_is_the_damping_reported() -> None:
    assert solved(random_case(12, 5, 6)).damping == (DAMP_IN, DAMP_OUT)


def test_raised_damping_is_used_and_reported_for_its_factor() -> None:
    case = random_case(13, 6, 8)
    indefinite = np.full((6, 6), 1.3)  # eigenvalue −0.3: 0.01 and 0.1 are too little
    np.fill_diagonal(indefinite, 1.0)
    case = Case(case.W, case.H_in, indefinite, case.grid, case.values)
    solution = solved(case, "none", percdamp_out=0.01)
    assert solution.damping == (DAMP_IN, pytest.approx(1.0))
    expected = obs(case, damped(case.H_in, DAMP_IN), damped(indefinite, 1.0))
    assert np.array_equal(solution.codes.numpy(), expected)


@pytest.mark.parametrize("factor", ["H_in", "H_out"])
def test_a_hopeless_factor_is_named(factor: str) -> None:
    arguments = small()
    H = arguments[factor]
    arguments[factor] = H - 10 * H.diagonal().mean() * torch.eye(len(H))
    with pytest.raises(NotPositiveDefiniteError, match=f"layer 3: {factor}"):
        bakron.solve(**arguments)


@pytest.mark.parametrize("act_order", ACT_ORDERS)
def test_column_weights_are_what_is_left_of_each_column_when_later_ones_make_up_for_it(
    act_order: ActOrder,
) -> None:
    case = random_case(19, 3, 8, in_kind="outliers")
    H = damped(case.H_in, DAMP_IN)
    order = descending(case.H_in) if act_order in ("in", "both") else list(range(8))
    weights = problem_of(case).column_weights(act_order)
    assert weights is not None
    for position, j in enumerate(order):
        rest = order[position:]
        conditional = 1 / np.linalg.inv(H[np.ix_(rest, rest)])[0, 0]
        assert float(weights[j]) == pytest.approx(conditional, rel=1e-9)


def test_without_an_input_factor_columns_have_no_weights() -> None:
    problem = LayerProblem("layer 3", torch.ones(2, 3), KroneckerHessian(None, None), DAMP_IN, DAMP_OUT)
    assert problem.column_weights() is None


# ----------------------------------------------------------------------------------------- certificate


@pytest.mark.parametrize("kernel", [*KERNELS, "reference"])
@pytest.mark.parametrize("grid", ["symmetric", "asymmetric", "clipped", "nf4"])
def test_honest_float32_passes_the_certificate(kernel: str, grid: str) -> None:
    m, n = (24, 30) if kernel == "reference" else (90, 130)
    case = random_case(14, m, n, grid, 32, in_kind="outliers", out_kind="low-rank")
    problem = problem_of(case, torch.float32)
    tile_kernel = None if kernel == "reference" else get_kernel(kernel, CPU)
    solution = solve_problem(problem, case.grid.to(torch.float32), "both", tile_kernel)
    assert solution.certificate.worst <= 1e-4
    assert solution.weight.dtype == torch.float32
    assert solution.loss <= 1.05 * solved(case, tile=64).loss


@properties
@given(cases)
def test_honest_float64_passes_the_certificate(case: Case) -> None:
    assert solved(case).certificate.worst <= 1e-9


def corrupting(kernel: TileKernel, row: int, column: int) -> TileKernel:
    """The kernel, except that one code is moved to its neighbour after its tile is done."""

    def corrupted(s: Sweep, r0: int, r1: int, c0: int, c1: int) -> None:
        kernel(s, r0, r1, c0, c1)
        if r0 <= row < r1 and c0 <= column < c1:
            s.codes[row, column] += 1 if s.codes[row, column] <= s.grid.first_code else -1

    return corrupted


@pytest.mark.parametrize("grid", ["symmetric", "asymmetric", "clipped", "nf4", "halves"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("act_order", ["none", "both"])
def test_one_corrupted_code_fails_the_certificate(grid: str, dtype: torch.dtype, act_order: ActOrder) -> None:
    case = random_case(15, 12, 17, grid, 5)
    for row, column in ((0, 0), (5, 9), (11, 16), (0, 16), (11, 0)):
        kernel = corrupting(get_kernel("numba", CPU), row, column)
        solution = solve_problem(problem_of(case, dtype), case.grid, act_order, kernel, 5)
        assert solution.certificate.worst > 1e-3


@pytest.mark.parametrize("end", [-8, 7])
def test_codes_at_an_end_that_they_should_not_be_at_fail_the_certificate(end: int) -> None:
    case = random_case(15, 12, 17)

    def only_the_end(s: Sweep, r0: int, r1: int, c0: int, c1: int) -> None:
        s.codes[r0:r1, c0:c1] = end

    certificate = solve_problem(problem_of(case), case.grid, "both", only_the_end, 5).certificate
    assert certificate.worst == certificate.clipped > 1 and certificate.unclipped == -0.5


def transposing(kernel: TileKernel) -> TileKernel:
    """The kernel fed with the wrong triangle: a plausible mistake of orientation."""

    def wrong(s: Sweep, r0: int, r1: int, c0: int, c1: int) -> None:
        assert s.U_out is not None
        kernel(
            Sweep(s.W, s.T, s.P, s.E, s.codes, s.U_out.flip(0, 1).T.contiguous(), s.U_in, s.grid),
            r0,
            r1,
            c0,
            c1,
        )

    return wrong


def test_a_wrong_orientation_fails_the_certificate() -> None:
    case = random_case(16, 12, 17)
    solution = solve_problem(problem_of(case), case.grid, "none", transposing(get_kernel("numba", CPU)), 64)
    assert solution.certificate.worst > 0.1


def test_certificate_reports_the_worse_of_its_two_parts() -> None:
    assert Certificate(-0.1, 0.3).worst == 0.3 and Certificate(0.2, -0.5).worst == 0.2


# -------------------------------------------------------------------------------- input and its errors

NAN = float("nan")


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"W": torch.zeros(4)}, ShapeError, ["layer 3", "(4,)"]),
        ({"W": torch.zeros(4, 6, 1)}, ShapeError, ["layer 3", "(4, 6, 1)"]),
        ({"W": torch.full((4, 6), NAN)}, NonFiniteError, ["layer 3", "24 of 24"]),
        ({"W": torch.full((4, 6), float("inf"))}, NonFiniteError, ["layer 3", "24 of 24"]),
        (
            {"H_in": torch.eye(4), "H_out": torch.eye(6)},
            ShapeError,
            ["layer 3: H_in", "(6, 6)", "(4, 4)", "d_in"],
        ),
        ({"H_in": torch.ones(6)}, ShapeError, ["layer 3: H_in", "(6,)"]),
        ({"H_out": torch.ones(4, 6)}, ShapeError, ["layer 3: H_out", "(4, 4)", "(4, 6)"]),
        ({"H_in": torch.full((6, 6), NAN)}, NonFiniteError, ["layer 3: H_in", "36 of 36"]),
        ({"H_out": torch.full((4, 4), NAN)}, NonFiniteError, ["layer 3: H_out", "16 of 16"]),
        ({"H_in": torch.ones(6, 6).triu()}, ShapeError, ["layer 3: H_in", "not symmetric"]),
        ({"H_out": torch.ones(4, 4).tril()}, ShapeError, ["layer 3: H_out", "not symmetric"]),
        ({"percdamp_in": -0.1}, ConfigError, ["layer 3", "percdamp_in", "-0.1"]),
        ({"percdamp_out": NAN}, ConfigError, ["layer 3", "percdamp_out", "nan"]),
        ({"percdamp_out": float("inf")}, ConfigError, ["layer 3", "percdamp_out", "inf"]),
        ({"shrink_out": 1.5}, ConfigError, ["layer 3", "shrink_out", "1.5"]),
        ({"act_order": "rows"}, ConfigError, ["act_order", "rows", "both"]),
        ({"kernel": "fortran"}, ConfigError, ["kernel", "fortran", "reference", "torch"]),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], error: type[BakronError], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        bakron.solve(**small() | changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("kernel", [*KERNELS, "reference"])
def test_float64_weights_are_swept_in_float64(kernel: str) -> None:
    """Weights so close to a tie that float32 could not tell on which side they are."""
    levels = torch.arange(-8, 8, dtype=torch.float64)
    nudge = 1e-12 * torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    ones = torch.ones(2, 1, dtype=torch.float64)
    grid = ScalarGrid(levels, ones, 0 * ones, torch.zeros(15, dtype=torch.int64))
    W = levels[:-1] + 0.5 + nudge
    problem = LayerProblem("layer 3", W, KroneckerHessian(torch.eye(15), torch.eye(2)), 0.01, 0.01)
    solution = solve_problem(
        problem, grid, "both", None if kernel == "reference" else get_kernel(kernel, CPU)
    )
    assert solution.codes.tolist() == [list(range(-8, 7)), list(range(-7, 8))]
    assert solution.weight.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_weights_are_solved_in_float32(dtype: torch.dtype) -> None:
    arguments = small()
    W = arguments.pop("W").to(dtype)
    solution = bakron.solve(W, **arguments)
    assert solution.weight.dtype == torch.float32
    assert torch.equal(solution.codes, bakron.solve(W.float(), **arguments).codes)
    assert solution.loss == bakron.solve(W.float(), **arguments).loss


@pytest.mark.filterwarnings("error")
def test_a_parameter_is_accepted_and_left_alone() -> None:
    arguments = small()
    W = arguments.pop("W")
    parameter = torch.nn.Parameter(W.clone())
    solution = bakron.solve(parameter, **arguments)
    expected = bakron.solve(W, **arguments)
    assert torch.equal(parameter.detach(), W)
    assert not solution.weight.requires_grad and torch.equal(solution.weight, expected.weight)
    assert solution.loss == expected.loss and solution.loss_rtn == expected.loss_rtn


def test_inputs_are_left_alone_and_results_repeat() -> None:
    arguments = small()
    before = {key: value.clone() for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    first, second = bakron.solve(**arguments), bakron.solve(**arguments)
    assert torch.equal(first.codes, second.codes)
    assert all(torch.equal(arguments[key], value) for key, value in before.items())


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
@pytest.mark.parametrize("kernel", [*KERNELS, "reference"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_tiny_and_huge_weights_are_solved_like_others(magnitude: float, kernel: str, symmetric: bool) -> None:
    case = random_case(17, 10, 14)
    quantizer = Integer(3, 4, symmetric, "minmax")
    arguments = {
        "H_in": case.tensor("H_in"),
        "H_out": case.tensor("H_out"),
        "quantizer": quantizer,
        "kernel": kernel,
    }
    solution = bakron.solve((magnitude * case.tensor("W")).float(), **arguments)
    assert solution.certificate.worst < 1e-4
    ratio = bakron.solve(case.tensor("W"), **arguments).loss / solution.loss
    assert ratio * magnitude**2 == pytest.approx(1, rel=0.1)


def test_default_quantizer_handles_a_short_last_group() -> None:
    rng = np.random.default_rng(18)
    W, H_in = (
        torch.from_numpy(x).float() for x in (rng.standard_normal((5, 300)), random_hessian(rng, 300, "full"))
    )
    solution = bakron.solve(W, H_in)
    assert solution.grid.group.tolist() == [j // 128 for j in range(300)]
    assert solution.loss < solution.loss_rtn


@pytest.mark.parametrize("two_sided", [False, True])
def test_float32_codes_do_not_depend_on_the_number_of_threads(two_sided: bool) -> None:
    case = random_case(3, 330, 290, group_size=32)
    H_out = case.tensor("H_out") if two_sided else None
    problem = LayerProblem(
        "layer", case.tensor("W").float(), KroneckerHessian(case.tensor("H_in"), H_out), 0.01, 0.3
    )
    threads = torch.get_num_threads()
    try:
        codes = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            codes.append(solve_problem(problem, case.grid, "both", get_kernel("numba", CPU), 32).codes)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(codes[0], codes[1]) and torch.equal(codes[0], codes[2])


def test_loss_of_float32_weights_is_that_of_float64_ones() -> None:
    case = random_case(4, 40, 50)
    single, double = (problem_of(case, dtype) for dtype in (torch.float32, torch.float64))
    rounded = case.grid.values(case.grid.nearest(case.tensor("W")))
    for size in (1.0, 1e-25, 1e25):
        E = size * (rounded - case.tensor("W"))
        hessian = KroneckerHessian(case.tensor("H_in"), case.tensor("H_out"))
        assert hessian.loss(E.float()) == pytest.approx(hessian.loss(E), rel=1e-5)
    assert single.loss(rounded) == pytest.approx(double.loss(rounded), rel=1e-5)
