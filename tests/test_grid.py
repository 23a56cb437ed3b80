"""Claims: nearest is the closest of all values, excess is ≤ 0 exactly for it, codes mean the right values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import GRIDS, NF4, code_values, random_case, round_to_nearest

from bakron.core.grid import ScalarGrid

properties = settings(deadline=None, derandomize=True, max_examples=40)
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 9)
group_sizes = st.sampled_from([1, 2, 4, 100])
grids = st.sampled_from(GRIDS)


def one_cell(levels: list[float], scale: float = 1.0, zero: float = 0.0) -> ScalarGrid:
    """A grid for 1×1 matrices."""
    cell = torch.ones(1, 1, dtype=torch.float64)
    return ScalarGrid(
        torch.tensor(levels).double(), scale * cell, zero * cell, torch.zeros(1, dtype=torch.int64)
    )


@properties
@given(seeds, sizes, sizes, grids, group_sizes)
def test_nearest_is_the_closest_of_all_values(seed: int, m: int, n: int, grid: str, group_size: int) -> None:
    case = random_case(seed, m, n, grid, group_size)
    codes = case.grid.nearest(case.tensor("W"))
    assert codes.dtype == torch.int16
    assert np.array_equal(codes.numpy(), round_to_nearest(case))
    expected = code_values(case, codes.numpy().astype(np.int64))
    assert np.allclose(case.grid.values(codes).numpy(), expected, rtol=1e-15, atol=0)


@properties
@given(seeds, sizes, sizes, grids, group_sizes)
def test_every_code_is_the_nearest_to_its_own_value(
    seed: int, m: int, n: int, grid: str, group_size: int
) -> None:
    case = random_case(seed, m, n, grid, group_size)
    rng = np.random.default_rng(seed)
    index = rng.integers(0, case.values.shape[2], (m, n))
    codes = torch.from_numpy(index + case.first_code)
    assert torch.equal(case.grid.nearest(case.grid.values(codes)).long(), codes)


@properties
@given(seeds, sizes, sizes, grids, group_sizes)
def test_a_permuted_grid_belongs_to_the_permuted_matrix(
    seed: int, m: int, n: int, grid: str, group_size: int
) -> None:
    case = random_case(seed, m, n, grid, group_size)
    rng = np.random.default_rng(seed)
    rows, columns = (torch.from_numpy(rng.permutation(k)) for k in (m, n))
    W = case.tensor("W")
    permuted = case.grid.permute(rows, columns)
    assert torch.equal(permuted.nearest(W[rows][:, columns]), case.grid.nearest(W)[rows][:, columns])
    codes = case.grid.nearest(W)
    assert torch.equal(permuted.values(codes[rows][:, columns]), case.grid.values(codes)[rows][:, columns])


@properties
@given(seeds, sizes, sizes, grids, group_sizes)
def test_excess_is_positive_exactly_when_another_value_is_closer(
    seed: int, m: int, n: int, grid: str, group_size: int
) -> None:
    case = random_case(seed, m, n, grid, group_size)
    best = round_to_nearest(case)
    n_levels = case.values.shape[2]
    moved = best - case.first_code + np.random.default_rng(seed).integers(-1, 2, (m, n))
    codes = np.clip(moved, 0, n_levels - 1) + case.first_code
    excess, clipped = case.grid.excess(case.tensor("W"), torch.from_numpy(codes))
    assert np.array_equal((excess > 0).numpy(), codes != best)
    index = codes - case.first_code
    assert np.array_equal(clipped.numpy(), (index == 0) | (index == n_levels - 1))


@properties
@given(seeds, sizes, sizes, st.sampled_from(["symmetric", "asymmetric", "wide"]), group_sizes)
def test_excess_of_an_unclipped_integer_code_is_in_grid_steps(
    seed: int, m: int, n: int, grid: str, group_size: int
) -> None:
    case = random_case(seed, m, n, grid, group_size)
    codes = case.grid.nearest(case.tensor("W"))
    excess, clipped = case.grid.excess(case.tensor("W"), codes)
    steps = (case.tensor("W") - case.grid.values(codes)).abs() / case.grid.scale[:, case.grid.group]
    assert torch.allclose(excess[~clipped], steps[~clipped] - 0.5, rtol=0, atol=1e-12)


def test_a_code_at_the_end_of_the_grid_is_measured_on_one_side() -> None:
    grid = one_cell([-2, -1, 0, 1])
    far = torch.tensor([[7.25]]).double()
    excess, clipped = grid.excess(far, torch.tensor([[1]]))
    assert float(excess) <= -0.5 and bool(clipped)
    excess, clipped = grid.excess(-far, torch.tensor([[1]]))
    assert float(excess) == pytest.approx(7.75) and bool(clipped)


def test_a_tie_suits_both_neighbours() -> None:
    grid = one_cell([-2, -1, 0, 1])
    for code in (-1, 0):
        assert float(grid.excess(torch.tensor([[-0.5]]).double(), torch.tensor([[code]]))[0]) == 0


@pytest.mark.parametrize(
    "levels, uniform, first",
    [
        ([-2, -1, 0, 1], True, -2),
        ([3, 4], True, 3),
        ([0], True, 0),
        (NF4, False, 0),
        ([-0.5, 0.5, 1.5], False, 0),
        ([0, 2, 4], False, 0),
        ([0, 1, 3], False, 0),
    ],
)
def test_only_consecutive_integers_are_uniform(levels: list[float], uniform: bool, first: int) -> None:
    grid = one_cell(list(levels))
    assert grid.uniform is uniform and grid.first_code == first


def test_a_grid_of_one_level_gives_that_level() -> None:
    for level in (0.0, 0.25):
        grid = one_cell([level], scale=2.0)
        codes = grid.nearest(torch.tensor([[5.0]]).double())
        assert float(grid.values(codes)) == 2 * level
        excess, clipped = grid.excess(torch.tensor([[5.0]]).double(), codes)
        assert float(excess) < 0 and bool(clipped)


def test_to_changes_dtypes_and_nothing_else() -> None:
    grid = random_case(0, 3, 5, "nf4", 2).grid
    single = grid.to(torch.float32)
    for name in ("levels", "scale", "zero"):
        assert torch.equal(getattr(single, name), getattr(grid, name).float())
    assert torch.equal(single.group, grid.group)


def test_an_offset_is_added_after_the_product() -> None:
    rng = np.random.default_rng(0)
    scale, offset = (torch.from_numpy(rng.uniform(0.1, 1, (50, 4))).float() for _ in range(2))
    grid = ScalarGrid.with_offset(torch.arange(16.0), scale, -offset, torch.arange(4))
    codes = torch.from_numpy(rng.integers(0, 16, (50, 4)))
    assert torch.equal(grid.values(codes), scale * codes - offset)
    assert not torch.equal(grid.values(codes), scale * (codes - offset / scale))
    rows, columns = torch.arange(50).flip(0), torch.tensor([2, 0, 3, 1])
    permuted = grid.permute(rows, columns).to(torch.float64)
    expected = grid.to(torch.float64).values(codes)[rows][:, columns]
    assert torch.equal(permuted.values(codes[rows][:, columns]), expected)
    assert permuted.zero.dtype == torch.float64 and torch.equal(
        permuted.zero, offset[rows].double() / scale[rows].double()
    )


@pytest.mark.parametrize("m, n", [(0, 3), (3, 0), (0, 0)])
def test_empty_matrices(m: int, n: int) -> None:
    grid = random_case(0, m, n).grid
    codes = grid.nearest(torch.zeros(m, n).double())
    assert codes.shape == grid.values(codes).shape == (m, n)
    assert grid.excess(torch.zeros(m, n).double(), codes)[0].shape == (m, n)
