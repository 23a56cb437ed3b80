"""Claims: in float64 the sweep gives the codes of dense OBS on kron(H_out, H_in), in every order, for every
tile size and kernel; GPTQ and round-to-nearest are special cases; the loss identity, its bound, the cost.
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
    conditional_target,
    damped,
    gptq,
    nearest,
    obs,
    quadratic_form,
    random_case,
    round_to_nearest,
    schedules,
)
from torch.utils._python_dispatch import TorchDispatchMode

from bakron.core.linalg import factorise
from bakron.core.reference import round_in_order
from bakron.core.solver import ROW_TILE_ONE_SIDED, sweep
from bakron.kernels import get_kernel, kernel_names

CPU = torch.device("cpu")
KERNELS = [name for name in kernel_names() if name != "triton"]
TILES = (1, 2, 3, 7, 16, 64)
DAMP_IN, DAMP_OUT = 0.02, 0.3

properties = settings(deadline=None, derandomize=True, max_examples=25)
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 11)
group_sizes = st.sampled_from([1, 3, 4, 100])
grids = st.sampled_from(GRIDS)
kinds = st.sampled_from(HESSIANS)
cases = st.builds(random_case, seeds, sizes, sizes, grids, group_sizes, kinds, kinds)


def factors(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """U_in and U_out of the damped Hessian factors."""
    U_in = factorise(case.tensor("H_in"), DAMP_IN, "H_in").U
    return U_in, factorise(case.tensor("H_out"), DAMP_OUT, "H_out").U


def swept(case: Case, kernel: str, tile: int) -> np.ndarray:
    """The codes of the sweep in float64."""
    return sweep(case.tensor("W"), case.grid, *factors(case), get_kernel(kernel, CPU), tile).numpy()


def dense(case: Case, order: list[tuple[int, int]] | None = None) -> np.ndarray:
    """The codes of the dense oracle on the same damped Hessian."""
    return obs(case, damped(case.H_in, DAMP_IN), damped(case.H_out, DAMP_OUT), order)


# ----------------------------------------------------------------------------------- the oracle itself


@properties
@given(seeds, st.integers(1, 4), st.integers(1, 4), grids)
def test_dense_oracle_is_greedy_conditional_minimisation(seed: int, m: int, n: int, grid: str) -> None:
    case = random_case(seed, m, n, grid)
    H: np.ndarray = np.kron(damped(case.H_out, DAMP_OUT), damped(case.H_in, DAMP_IN))
    w, values = case.W.reshape(-1), case.values.reshape(m * n, -1)
    error, index = np.zeros(m * n), []
    for q in range(m * n):
        index.append(nearest(values[q], conditional_target(w, H, error, list(range(q)), q)))
        error[q] = values[q, index[q]] - w[q]
    assert np.array_equal(dense(case).reshape(-1), np.array(index) + case.first_code)


# ------------------------------------------------------------------------- fact 1: equal to the oracle


@properties
@given(cases, st.sampled_from(["rows", "columns", "anti-diagonals", "random"]), seeds)
def test_reference_in_any_admissible_order_equals_the_dense_oracle(
    case: Case, schedule: str, seed: int
) -> None:
    m, n = case.W.shape
    order = schedules(m, n, seed)[schedule]
    expected = dense(case)
    assert np.array_equal(dense(case, order), expected)
    assert np.array_equal(
        round_in_order(case.tensor("W"), case.grid, *factors(case), order).numpy(), expected
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tile", TILES)
@settings(properties, max_examples=15)
@given(case=cases)
def test_sweep_equals_the_dense_oracle(kernel: str, tile: int, case: Case) -> None:
    assert np.array_equal(swept(case, kernel, tile), dense(case))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "m, n, tile", [(70, 5, 64), (4, 129, 64), (1, 67, 16), (130, 1, 64), (17, 20, 7), (33, 9, 16)]
)
@pytest.mark.parametrize("grid", ["clipped", "asymmetric", "nf4"])
def test_sweep_over_several_tiles_equals_the_dense_oracle(
    kernel: str, m: int, n: int, tile: int, grid: str
) -> None:
    case = random_case(m * n + tile, m, n, grid, group_size=3, in_kind="outliers", out_kind="low-rank")
    assert np.array_equal(swept(case, kernel, tile), dense(case))


@pytest.mark.parametrize("kernel", KERNELS)
def test_tile_size_and_kernel_change_nothing_on_a_larger_matrix(kernel: str) -> None:
    case = random_case(0, 53, 75, "clipped", group_size=32, out_kind="low-rank")
    expected = swept(case, "numba", 200)
    for tile in (11, 16, 64):
        assert np.array_equal(swept(case, kernel, tile), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_inputs_are_left_alone_and_the_result_repeats(kernel: str) -> None:
    case = random_case(1, 20, 30)
    W, before = case.tensor("W"), case.tensor("W")
    U_in, U_out = factors(case)
    results = [sweep(W, case.grid, U_in, U_out, get_kernel(kernel, CPU), 8) for _ in range(2)]
    assert torch.equal(W, before) and torch.equal(results[0], results[1])


@pytest.mark.parametrize("kernel", KERNELS)
def test_non_contiguous_input_is_read_as_it_is_indexed(kernel: str) -> None:
    case = random_case(2, 12, 19, out_kind="low-rank")
    U_in, U_out = factors(case)
    strided = [x.T.contiguous().T for x in (case.tensor("W"), U_in, U_out)]
    codes = sweep(strided[0], case.grid, strided[1], strided[2], get_kernel(kernel, CPU), 5)
    assert np.array_equal(codes.numpy(), dense(case))


@pytest.mark.parametrize("kernel", KERNELS)
def test_codes_do_not_depend_on_the_number_of_threads(kernel: str) -> None:
    case = random_case(3, *((190, 210) if kernel == "numba" else (40, 50)), group_size=32)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(swept(case, kernel, 16))
    finally:
        torch.set_num_threads(threads)
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("m, n", [(0, 4), (4, 0), (0, 0)])
def test_empty_matrices(kernel: str, m: int, n: int) -> None:
    case = random_case(0, m, n)
    assert swept(case, kernel, 2).shape == (m, n)


# --------------------------------------------------------------- facts 2 to 4: special cases, symmetry


@pytest.mark.parametrize("kernel", KERNELS)
@properties
@given(case=cases, tile=st.sampled_from(TILES), constant=st.booleans())
def test_diagonal_output_factor_gives_gptq(kernel: str, case: Case, tile: int, constant: bool) -> None:
    H_in = damped(case.H_in, DAMP_IN)
    U_in, _ = factors(case)
    diagonal = torch.from_numpy(np.random.default_rng(0).uniform(0.1, 10, case.W.shape[0]))
    U_out = None if constant else factorise(torch.diag(diagonal), DAMP_OUT, "H_out").U
    codes = sweep(case.tensor("W"), case.grid, U_in, U_out, get_kernel(kernel, CPU), tile)
    assert np.array_equal(codes.numpy(), gptq(case, H_in))


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_sided_sweep_of_more_rows_than_a_tall_tile(kernel: str) -> None:
    case = random_case(4, ROW_TILE_ONE_SIDED + 3, 9, "clipped", out_kind="diagonal")
    codes = sweep(case.tensor("W"), case.grid, factors(case)[0], None, get_kernel(kernel, CPU), 4)
    assert np.array_equal(codes.numpy(), gptq(case, damped(case.H_in, DAMP_IN)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("absent", ["both", "in", "out", "neither"])
def test_two_diagonal_factors_give_round_to_nearest(kernel: str, absent: str) -> None:
    case = random_case(5, 19, 23, "nf4", 4, in_kind="diagonal", out_kind="diagonal")
    U_in, U_out = factors(case)
    U_in = None if absent in ("in", "both") else U_in
    U_out = None if absent in ("out", "both") else U_out
    codes = sweep(case.tensor("W"), case.grid, U_in, U_out, get_kernel(kernel, CPU), 7)
    assert np.array_equal(codes.numpy(), round_to_nearest(case))


def per_tensor(case: Case) -> Case:
    """The same problem with one scale and zero for the whole matrix, so that it can be transposed."""
    scale, zero = float(case.grid.scale[0, 0]), float(case.grid.zero[0, 0])
    return with_constant_grid(case, scale, zero, *case.W.shape)


def with_constant_grid(case: Case, scale: float, zero: float, m: int, n: int) -> Case:
    ones = torch.ones(m, 1, dtype=torch.float64)
    grid = type(case.grid)(case.grid.levels, scale * ones, zero * ones, torch.zeros(n, dtype=torch.int64))
    values = np.broadcast_to(scale * (case.grid.levels.numpy() - zero), (m, n, len(case.grid.levels)))
    return Case(case.W, case.H_in, case.H_out, grid, values)


@pytest.mark.parametrize("kernel", KERNELS)
@properties
@given(case=cases, tile=st.sampled_from(TILES))
def test_transposing_the_problem_transposes_the_codes(kernel: str, case: Case, tile: int) -> None:
    case = per_tensor(case)
    m, n = case.W.shape
    scale, zero = float(case.grid.scale[0, 0]), float(case.grid.zero[0, 0])
    U_in, U_out = factors(case)
    other = with_constant_grid(case, scale, zero, n, m).grid
    codes = sweep(case.tensor("W"), case.grid, U_in, U_out, get_kernel(kernel, CPU), tile)
    transposed = sweep(case.tensor("W").T, other, U_out, U_in, get_kernel(kernel, CPU), tile)
    assert torch.equal(transposed.T, codes)


@pytest.mark.parametrize("kernel", KERNELS)
@properties
@given(case=cases, tile=st.sampled_from(TILES), by_in=st.sampled_from([1e-9, 0.3, 1e7]))
def test_scaling_a_factor_changes_nothing(kernel: str, case: Case, tile: int, by_in: float) -> None:
    scaled = Case(case.W, by_in * case.H_in, case.H_out / by_in, case.grid, case.values)
    assert np.array_equal(swept(scaled, kernel, tile), swept(case, kernel, tile))


@pytest.mark.parametrize("kernel", KERNELS)
@properties
@given(case=cases, tile=st.sampled_from(TILES), seed=seeds)
def test_weights_on_the_grid_are_fixed_points(kernel: str, case: Case, tile: int, seed: int) -> None:
    index = np.random.default_rng(seed).integers(0, case.values.shape[2], case.W.shape)
    codes = index + case.first_code
    on_grid = Case(code_values(case, codes), case.H_in, case.H_out, case.grid, case.values)
    assert np.array_equal(swept(on_grid, kernel, tile), codes)


# ------------------------------------------------------------------------------------ fact 5: the loss


@properties
@given(seeds, sizes, sizes, group_sizes, kinds, kinds)
def test_loss_identity_and_bound_without_clipping(
    seed: int, m: int, n: int, group_size: int, in_kind: str, out_kind: str
) -> None:
    case = random_case(seed, m, n, "wide", group_size, in_kind, out_kind)
    factor_in = factorise(case.tensor("H_in"), DAMP_IN, "H_in")
    factor_out = factorise(case.tensor("H_out"), DAMP_OUT, "H_out")
    E = code_values(case, swept(case, "numba", 3).astype(np.int64)) - case.W
    loss = quadratic_form(E, damped(case.H_in, DAMP_IN), damped(case.H_out, DAMP_OUT))
    D = np.outer(factor_out.D.numpy(), factor_in.D.numpy())
    eta = factor_out.U.numpy().T @ E @ factor_in.U.numpy()
    assert np.sum(D * eta**2) == pytest.approx(loss, rel=1e-9)
    scale = case.grid.scale[:, case.grid.group].numpy()
    assert loss <= 0.25 * np.sum(scale**2 * D) * (1 + 1e-9)


@properties
@given(cases)
def test_loss_identity_holds_with_clipping(case: Case) -> None:
    factor_in = factorise(case.tensor("H_in"), DAMP_IN, "H_in")
    factor_out = factorise(case.tensor("H_out"), DAMP_OUT, "H_out")
    E = code_values(case, swept(case, "numba", 3).astype(np.int64)) - case.W
    eta = factor_out.U.numpy().T @ E @ factor_in.U.numpy()
    loss = quadratic_form(E, damped(case.H_in, DAMP_IN), damped(case.H_out, DAMP_OUT))
    D = np.outer(factor_out.D.numpy(), factor_in.D.numpy())
    assert np.sum(D * eta**2) == pytest.approx(loss, rel=1e-9)


# ------------------------------------------------------------------------------------- arithmetic cost


class Products(TorchDispatchMode):
    """Counts the flops of every matrix product that torch is asked for by this thread, which gets no help meanwhile."""

    OTHERS = ("mm", "addmm", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "addmv_", "addr", "addr_", "dot")

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __enter__(self) -> Products:
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.set_num_threads(self.threads)
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name == "addmm_":
            _, left, right = args[:3]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        elif name in self.OTHERS:
            raise AssertionError(f"a product that this test does not count: {name}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "m, n, tile", [(64, 64, 8), (24, 96, 8), (96, 24, 8), (8, 8, 8), (8, 80, 8), (40, 56, 4)]
)
def test_products_outside_tiles_do_every_multiply_once(m: int, n: int, tile: int) -> None:
    case = random_case(0, m, n)
    U_in, U_out = factors(case)
    with Products() as products:
        sweep(case.tensor("W"), case.grid, U_in, U_out, get_kernel("numba", CPU), tile)
    assert products.flops == m * n * (m + n - 2 * tile)  # mn(m+n) less what happens inside the tiles


def test_products_of_ragged_sizes_stay_within_the_same_cost() -> None:
    m, n, tile = 45, 71, 8
    case = random_case(0, m, n)
    U_in, U_out = factors(case)
    with Products() as products:
        sweep(case.tensor("W"), case.grid, U_in, U_out, get_kernel("numba", CPU), tile)
    assert m * n * (m + n - 2 * tile) <= products.flops <= m * n * (m + n)


def test_one_sided_products_cost_what_gptq_costs() -> None:
    m, n, tile = 40, 96, 8
    case = random_case(0, m, n, out_kind="diagonal")
    U_in, _ = factors(case)
    with Products() as products:
        sweep(case.tensor("W"), case.grid, U_in, None, get_kernel("numba", CPU), tile)
    assert products.flops == m * n * (n - tile)
