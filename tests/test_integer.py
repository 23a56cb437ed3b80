"""Claims: integer grids cover what they must and store exactly; the search never loses to min-max, also when columns
weigh differently (then it serves those of large weight), and serves weights of either sign alike.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bakron.core.grid import ScalarGrid
from bakron.errors import ConfigError, NonFiniteError, ShapeError
from bakron.quantizers.integer import Integer

properties = settings(deadline=None, derandomize=True, max_examples=60)
seeds = st.integers(0, 2**32 - 1)
shapes = st.tuples(st.integers(0, 7), st.integers(0, 20))
bits = st.integers(2, 8)
group_sizes = st.sampled_from([-1, 1, 3, 8, 128])
dtypes = st.sampled_from([torch.float32, torch.float64])
scale_dtypes = st.sampled_from([None, torch.float32, torch.float16, torch.bfloat16])
quantizers = st.builds(
    Integer,
    bits,
    group_sizes,
    st.booleans(),
    st.sampled_from(["minmax", "mse", "hessian"]),
    scale_dtype=scale_dtypes,
)


def weights(seed: int, shape: tuple[int, int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Weights with heavy tails, and here and there a column of zeros, of positive or of negative weights."""
    rng = np.random.default_rng(seed)
    W = rng.standard_t(4, shape)
    for j in range(shape[1]):
        W[:, j] = [W[:, j], 0 * W[:, j], abs(W[:, j]), -abs(W[:, j])][rng.choice(4, p=[0.7, 0.1, 0.1, 0.1])]
    return torch.from_numpy(W).to(dtype)


def errors(W: torch.Tensor, grid: ScalarGrid, column_weights: torch.Tensor | None = None) -> torch.Tensor:
    """Squared rounding error (m, n_groups) in float64, from the definition: each weight at its best level."""
    scale, zero = (x.double()[:, grid.group, None] for x in (grid.scale, grid.zero))
    values = scale * (grid.levels.double() - zero)
    closest = (values - W.double()[:, :, None]).square().amin(2) if W.numel() else W.double()
    if column_weights is not None:
        closest = closest * column_weights.double()
    return torch.zeros(grid.scale.shape, dtype=torch.float64).index_add_(1, grid.group, closest)


@properties
@given(quantizers, seeds, shapes, dtypes)
def test_a_grid_is_storable(
    quantizer: Integer, seed: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    W = weights(seed, shape, dtype)
    grid = quantizer.fit(W)
    m, n = shape
    size = min(quantizer.group_size, n) if quantizer.group_size > 0 else n
    assert grid.scale.shape == grid.zero.shape == (m, -(-n // size) if n else 0)
    assert grid.group.tolist() == [j // size for j in range(n)]
    low, high = -(2 ** (quantizer.bits - 1)), 2 ** (quantizer.bits - 1) - 1
    assert grid.levels.tolist() == list(range(low, high + 1)) and grid.uniform
    assert grid.scale.dtype == grid.zero.dtype == grid.levels.dtype == dtype
    assert bool((grid.scale != 0).all()) and bool(torch.isfinite(grid.scale).all())
    if not quantizer.symmetric or quantizer.scale == "minmax":
        assert bool((grid.scale > 0).all())
    assert torch.equal(grid.zero, grid.zero.round()) and bool(
        ((grid.zero >= low) & (grid.zero <= high)).all()
    )
    if quantizer.symmetric:
        assert not grid.zero.any()
    if quantizer.scale_dtype is not None:
        assert torch.equal(grid.scale.to(quantizer.scale_dtype).to(dtype), grid.scale)


@properties
@given(bits, group_sizes, st.booleans(), seeds, shapes)
def test_minmax_brings_every_weight_within_half_a_step(
    n_bits: int, group_size: int, symmetric: bool, seed: int, shape: tuple[int, int]
) -> None:
    W = weights(seed, shape)
    grid = Integer(n_bits, group_size, symmetric, "minmax").fit(W)
    distance = (grid.values(grid.nearest(W)) - W).abs()
    assert bool((distance <= grid.scale[:, grid.group] * (0.5 + 1e-9)).all())


@properties
@given(bits, group_sizes, seeds, shapes)
def test_symmetric_minmax_is_the_smallest_scale_that_covers(
    n_bits: int, group_size: int, seed: int, shape: tuple[int, int]
) -> None:
    W = weights(seed, shape)
    grid = Integer(n_bits, group_size, True, "minmax").fit(W)
    low, high = float(grid.levels[0]), float(grid.levels[-1])
    ends = torch.maximum(W / low, W / high)  # how large a scale each weight needs
    for i in range(shape[0]):
        for g in range(grid.scale.shape[1]):
            needed = float(ends[i, grid.group == g].max())
            assert float(grid.scale[i, g]) == pytest.approx(needed if needed > 0 else 1, rel=1e-12)


@properties
@given(bits, group_sizes, st.booleans(), scale_dtypes, seeds, shapes, dtypes)
def test_the_search_never_loses_to_minmax(
    n_bits: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: torch.dtype | None,
    seed: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    W = weights(seed, shape, dtype)
    searched = errors(W, Integer(n_bits, group_size, symmetric, "mse", scale_dtype).fit(W))
    covered = errors(W, Integer(n_bits, group_size, symmetric, "minmax", scale_dtype).fit(W))
    assert bool((searched <= covered * (1 + 1e-5)).all())


@properties
@given(quantizers.filter(lambda q: q.symmetric and q.scale != "minmax"), seeds, shapes, dtypes)
def test_a_symmetric_search_serves_both_signs_alike(
    quantizer: Integer, seed: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Its grid has one level more on one side, on whichever each group needs it."""
    W = weights(seed, shape, dtype)
    importance = torch.from_numpy(np.random.default_rng(seed).exponential(1, shape[1]))
    of_weight, of_negative = (errors(V, quantizer.fit(V, importance), importance) for V in (W, -W))
    assert torch.allclose(of_weight, of_negative, rtol=1e-5)


@pytest.mark.parametrize("n_bits", [2, 3])
def test_an_asymmetric_search_finds_the_best_zero(n_bits: int) -> None:
    """Against all zeros with the same scales: on one side more may be given up than on the other."""
    W = torch.from_numpy(np.random.default_rng(0).standard_normal((200, 16)) + 0.3)
    searched = errors(W, Integer(n_bits, -1, False, "mse").fit(W))[:, 0]
    minmax = Integer(n_bits, -1, False, "minmax").fit(W)
    low, high = int(minmax.levels[0]), int(minmax.levels[-1])
    best = torch.full_like(searched, torch.inf)
    for zero in range(low, high + 1):
        for shrink in torch.linspace(1, 0.3, 36, dtype=W.dtype):
            grid = replace(minmax, scale=shrink * minmax.scale, zero=torch.full_like(minmax.zero, zero))
            best = torch.minimum(best, errors(W, grid)[:, 0])
    assert float((searched / best).mean()) < 1.01


@properties
@given(scale_dtypes, seeds, dtypes)
def test_stored_scales_are_the_nearest_that_the_checkpoint_can_hold(
    scale_dtype: torch.dtype | None, seed: int, dtype: torch.dtype
) -> None:
    scale = weights(seed, (5, 7), dtype)
    limits = torch.finfo(scale_dtype or dtype)
    scale[0, :4] = torch.tensor([0.0, 1e-44, limits.max, -limits.max], dtype=dtype)
    stored = Integer(scale="hessian", scale_dtype=scale_dtype).storable(scale)
    assert stored.dtype == dtype and bool((stored != 0).all()) and bool(torch.isfinite(stored).all())
    assert torch.equal(stored.to(scale_dtype or dtype).to(dtype), stored)
    assert torch.equal(stored < 0, scale < 0)
    assert torch.allclose(stored, scale, rtol=limits.eps, atol=limits.tiny)


def test_a_large_positive_weight_gets_a_negative_scale() -> None:
    grid = Integer(2, -1, True).fit(torch.tensor([[2.0, -1.0, 1.0, 0.0], [-2.0, 1.0, -1.0, 0.0]]))
    assert grid.scale[:, 0].tolist() == [-1, 1]


@properties
@given(bits, group_sizes, st.booleans(), scale_dtypes, seeds, shapes, dtypes)
def test_the_weighted_search_never_loses_in_the_weighted_error(
    n_bits: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: torch.dtype | None,
    seed: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    W = weights(seed, shape, dtype)
    importance = torch.from_numpy(np.random.default_rng(seed).exponential(1, shape[1]) ** 4)
    searched, unweighted, covered = (
        errors(W, Integer(n_bits, group_size, symmetric, kind, scale_dtype).fit(W, given), importance)
        for kind, given in (("hessian", importance), ("mse", importance), ("minmax", importance))
    )
    assert bool((searched <= torch.minimum(unweighted, covered) * (1 + 1e-5)).all())


@properties
@given(quantizers, seeds, shapes, st.floats(1e-12, 1e12))
def test_equal_weights_and_no_weights_are_the_same_whatever_their_size(
    quantizer: Integer, seed: int, shape: tuple[int, int], size: float
) -> None:
    W = weights(seed, shape)
    grid = quantizer.fit(W)
    for importance in (torch.full((shape[1],), 4.0) * 2.0 ** round(np.log2(size)), torch.zeros(shape[1])):
        weighted = quantizer.fit(W, importance)
        assert torch.equal(weighted.scale, grid.scale) and torch.equal(weighted.zero, grid.zero)


def test_a_heavy_column_gets_the_scale_that_it_needs() -> None:
    W = torch.from_numpy(np.random.default_rng(6).standard_normal((50, 16)))
    importance = torch.ones(16, dtype=torch.float64)
    importance[9] = 1e6
    of_column = [
        float((grid.values(grid.nearest(W)) - W)[:, 9].square().mean())
        for grid in (Integer(3, 8, scale=kind).fit(W, importance) for kind in ("mse", "hessian"))
    ]
    assert of_column[1] < 0.1 * of_column[0]


@pytest.mark.parametrize(
    "importance, error, word",
    [
        (torch.ones(5), ShapeError, "each of 6"),
        (torch.ones(1, 6), ShapeError, "(1, 6)"),
        (-torch.ones(6), NonFiniteError, "negative"),
        (torch.full((6,), float("nan")), NonFiniteError, "NaN"),
    ],
)
def test_bad_column_weights_are_named(importance: torch.Tensor, error: type[Exception], word: str) -> None:
    with pytest.raises(error) as caught:
        Integer(4, 3, scale="hessian").fit(torch.ones(2, 6), importance)
    assert word in str(caught.value)


@pytest.mark.parametrize("n_bits, ratio", [(2, 0.6), (3, 0.8), (4, 0.9)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_search_wins_on_gaussian_weights(n_bits: int, ratio: float, symmetric: bool) -> None:
    W = torch.from_numpy(np.random.default_rng(0).standard_normal((64, 128)))
    searched, covered = (
        errors(W, Integer(n_bits, 128, symmetric, kind).fit(W)).sum() for kind in ("mse", "minmax")
    )
    assert float(searched) < ratio * float(covered)


@properties
@given(quantizers, seeds, st.integers(1, 5), st.integers(2, 17))
def test_rows_and_groups_are_independent(quantizer: Integer, seed: int, m: int, n: int) -> None:
    W = weights(seed, (m, n))
    grid = quantizer.fit(W)
    size = min(quantizer.group_size, n) if quantizer.group_size > 0 else n
    row, group = seed % m, (seed // 7) % grid.scale.shape[1]
    alone = quantizer.fit(W[row : row + 1, group * size : (group + 1) * size])
    assert torch.allclose(alone.scale[0, 0], grid.scale[row, group], rtol=1e-12)
    assert torch.equal(alone.zero[0, 0], grid.zero[row, group])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["minmax", "mse"])
@pytest.mark.parametrize("scale_dtype", [None, torch.float16, torch.bfloat16])
def test_a_group_of_zeros_stays_zero(symmetric: bool, kind: str, scale_dtype: torch.dtype | None) -> None:
    W = torch.zeros(3, 8)
    W[1, 4:] = torch.tensor([0.5, -1.0, 0.25, 1.0])
    grid = Integer(4, 4, symmetric, kind, scale_dtype).fit(W)  # type: ignore[arg-type]
    values = grid.values(grid.nearest(W))
    assert torch.equal(values[W == 0], W[W == 0])
    assert grid.scale[0].tolist() == [1.0, 1.0] and float(grid.scale[1, 1]) != 1


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_is_on_every_grid(symmetric: bool) -> None:
    W = weights(1, (6, 20)) + torch.tensor([3.0, -3.0, 0, 0, 10, -0.1])[:, None]
    grid = Integer(3, 5, symmetric, "mse").fit(W)
    nothing = torch.zeros_like(W)
    assert torch.equal(grid.values(grid.nearest(nothing)), nothing)


@pytest.mark.parametrize("shift", [5.0, -5.0])
def test_an_integer_zero_pays_for_one_sided_weights(shift: float) -> None:
    W = torch.from_numpy(np.random.default_rng(2).uniform(0, 5, (8, 64))) + min(shift, 0)
    symmetric, asymmetric = (errors(W, Integer(4, 64, kind, "minmax").fit(W)).sum() for kind in (True, False))
    assert float(asymmetric) < 0.35 * float(symmetric)


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-30, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["minmax", "mse"])
def test_tiny_and_huge_weights_give_finite_grids(magnitude: float, symmetric: bool, kind: str) -> None:
    W = magnitude * torch.from_numpy(np.random.default_rng(3).standard_normal((4, 16))).float()
    for scale_dtype in (None, torch.float16, torch.bfloat16):
        grid = Integer(4, 8, symmetric, kind, scale_dtype).fit(W)  # type: ignore[arg-type]
        assert bool(torch.isfinite(grid.scale).all()) and bool((grid.scale != 0).all())
        assert bool(((grid.zero >= -8) & (grid.zero <= 7)).all())
        values = grid.values(grid.nearest(W))
        assert bool(torch.isfinite(values).all())
        if scale_dtype is not torch.float16 and magnitude > 1e-37:
            assert bool(((values - W).abs() <= grid.scale[:, grid.group].abs() * 4).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_weights_are_fitted_in_float32(dtype: torch.dtype) -> None:
    W = weights(4, (3, 16)).to(dtype)
    grid, expected = Integer(4, 8).fit(W), Integer(4, 8).fit(W.float())
    assert grid.scale.dtype == torch.float32 and torch.equal(grid.scale, expected.scale)


def test_the_weight_is_left_alone() -> None:
    W = weights(5, (3, 10))
    before = W.clone()
    Integer(3, 4, False).fit(W)
    assert torch.equal(W, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_are_an_error(bad: float) -> None:
    with pytest.raises(NonFiniteError, match="weight"):
        Integer().fit(torch.full((2, 2), bad))


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"bits": 1}, "bits"),
        ({"bits": 9}, "bits"),
        ({"bits": 4.0}, "bits"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": -2}, "group_size"),
        ({"scale": "best"}, "scale"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        Integer(**settings)  # type: ignore[arg-type]
    assert str(settings[word]) in str(caught.value)
