"""Claims for every quantizer and every choice of its settings, both found automatically: codes mean values exactly, a
weight on the grid stays, solving is certified and better than rounding to nearest, the search never loses, rows are
fitted alone, and odd, empty, zero, constant, huge, tiny and non-finite weights give finite grids or named errors.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from itertools import product
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from oracle import random_hessian

import bakron
import bakron.quantizers
from bakron.core.grid import ScalarGrid
from bakron.core.hessian import KroneckerHessian
from bakron.core.solution import LayerProblem, Solution, solve_problem
from bakron.errors import ConfigError, FormatError, NonFiniteError
from bakron.kernels import get_kernel
from bakron.quantizers import Quantizer, get_quantizer, quantizer_names

WIDTHS = (
    150,
    160,
    256,
)  # the first that a format takes: with a short last group, of whole groups, of whole blocks


def choices(kind: type[Quantizer]) -> dict[str, tuple[Any, ...]]:
    """All values of each setting that has few: those annotated as Literal or bool."""
    hints = get_type_hints(kind)
    few = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if hints[field.name] is bool:
            few[field.name] = (True, False)
        elif get_origin(hints[field.name]) is Literal:
            few[field.name] = get_args(hints[field.name])
    return few


def configurations() -> list[Any]:
    """Every quantizer with every combination of such settings."""
    found = []
    for name in quantizer_names():
        kind = get_quantizer(name)
        few = choices(kind)
        for values in product(*few.values()):
            label = "-".join([name, *(str(value) for value in values)])
            found.append(pytest.param(kind(**dict(zip(few, values, strict=True))), id=label))
    return found


every = pytest.mark.parametrize("quantizer", configurations())
searched = pytest.mark.parametrize(
    "quantizer", [c for c in configurations() if getattr(c.values[0], "scale", None) == "mse"]
)


def weights(
    seed: int, m: int, n: int, magnitude: float = 1.0, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Weights with heavy tails."""
    return torch.from_numpy(magnitude * np.random.default_rng(seed).standard_t(5, (m, n))).to(dtype)


def width(quantizer: Quantizer) -> int:
    """A number of columns that the quantizer takes."""
    for n in WIDTHS:
        try:
            quantizer.fit(torch.zeros(1, n))
        except FormatError:
            continue
        return n
    raise AssertionError(f"{quantizer} takes none of {WIDTHS}")


def rounded(quantizer: Quantizer, W: torch.Tensor) -> torch.Tensor:
    grid = quantizer.fit(W)
    return grid.values(grid.nearest(W.to(grid.scale.dtype)))


def problem_of(W: torch.Tensor, seed: int) -> LayerProblem:
    """The weight with correlated Hessian factors."""
    rng = np.random.default_rng(seed)
    H_out, H_in = (torch.from_numpy(random_hessian(rng, size, "full")) for size in W.shape)
    return LayerProblem("layer 3", W, KroneckerHessian(H_in, H_out), 0.01, 0.1)


def solved(W: torch.Tensor, grid: ScalarGrid, seed: int) -> Solution:
    return solve_problem(problem_of(W, seed), grid, "both", get_kernel("auto", W.device), tile=16)


def same(a: ScalarGrid, b: ScalarGrid) -> bool:
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a) if f.name != "levels"]
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


# --------------------------------------------------------------------------------------------- discovery


def test_names_are_those_of_the_files() -> None:
    files = [module.name for module in pkgutil.iter_modules(bakron.quantizers.__path__)]
    assert set(files) <= set(quantizer_names())
    assert {"e8", "float4", "gguf", "integer", "nf4", "ternary"} <= set(files)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'int4' is not one of .*integer"):
        get_quantizer("int4")


@pytest.mark.parametrize("name", quantizer_names())
def test_a_setting_outside_its_choices_is_named(name: str) -> None:
    kind = get_quantizer(name)
    for setting, values in choices(kind).items():
        if values != (True, False):
            with pytest.raises(ConfigError, match=f"{setting}: 'nonsense' .*{values[-1]}"):
                kind(**{setting: "nonsense"})


# -------------------------------------------------------------------------------------------------- grids


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_codes_and_values_are_one_to_one(quantizer: Quantizer, dtype: torch.dtype) -> None:
    W = weights(0, 7, width(quantizer), dtype=dtype)
    grid = quantizer.fit(W)
    assert grid.scale.dtype == grid.zero.dtype == grid.levels.dtype == dtype
    assert bool((grid.scale != 0).all()) and bool(torch.isfinite(grid.scale).all())
    codes = grid.nearest(weights(1, *W.shape, 3, dtype))
    if grid.run == 1:  # every level is a code of its own
        index = torch.from_numpy(np.random.default_rng(1).integers(0, len(grid.levels), W.shape))
        codes = (index + grid.first_code).to(torch.int16)
    values = grid.values(codes)
    assert values.dtype == dtype and torch.equal(grid.nearest(values), codes)
    assert torch.equal(grid.to(torch.float64).values(codes).to(dtype), values)  # one rounding at most


@every
def test_a_row_is_fitted_without_the_others(quantizer: Quantizer) -> None:
    W = weights(2, 6, width(quantizer), dtype=torch.float32)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert torch.equal(rounded(quantizer, W[order]), rounded(quantizer, W)[order])


@every
def test_the_weight_is_left_alone_and_low_precision_is_fitted_in_float32(quantizer: Quantizer) -> None:
    W = weights(3, 4, width(quantizer), dtype=torch.bfloat16)
    before = W.clone()
    assert same(quantizer.fit(W), quantizer.fit(W.float())) and torch.equal(W, before)


@searched
@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e30])
def test_the_search_never_loses(quantizer: Quantizer, magnitude: float) -> None:
    plain = dataclasses.replace(quantizer, scale=choices(type(quantizer))["scale"][0])  # type: ignore[type-var]
    W = weights(4, 24, width(quantizer), magnitude, torch.float32)
    try:
        errors = [
            float(((rounded(q, W).double() - W.double()) / magnitude).square().sum())
            for q in (quantizer, plain)
        ]
    except FormatError:
        assert magnitude == 1e30
    else:
        assert errors[0] <= errors[1] * (1 + 1e-6)
        too_small = magnitude == 1e-30 and isinstance(quantizer, bakron.Gguf)  # for fp16 scales
        assert errors[0] < errors[1] or too_small


# -------------------------------------------------------------------------------------------------- solving


@every
def test_a_weight_on_the_grid_stays(quantizer: Quantizer) -> None:
    W = weights(5, 9, width(quantizer), dtype=torch.float32)
    grid = quantizer.fit(W)
    codes = grid.nearest(W)
    solution = solved(grid.values(codes), grid, 5)
    assert torch.equal(solution.codes, codes) and solution.loss == 0
    assert torch.equal(solution.weight, grid.values(codes))


@every
def test_solutions_are_certified_and_have_less_loss_than_rounding_to_nearest(
    quantizer: Quantizer,
) -> None:
    ratios = []
    for seed in range(3):
        W = weights(seed, 20, width(quantizer), 0.05, torch.float64 if seed == 2 else torch.float32)
        solution = solved(W, quantizer.fit(W), seed)
        assert solution.certificate.worst < (1e-9 if seed == 2 else 1e-4)
        ratios.append(solution.loss / solution.loss_rtn)
    assert max(ratios) < 1 and np.mean(ratios) < 0.8


@every
def test_solve_takes_it(quantizer: Quantizer) -> None:
    W = weights(6, 5, width(quantizer), dtype=torch.float32)
    problem = problem_of(W, 6)
    solution = bakron.solve(W, problem.H_in, problem.H_out, quantizer=quantizer)
    assert torch.equal(solution.weight, solution.grid.values(solution.codes))


# --------------------------------------------------------------------------------------------------- corners


@every
@pytest.mark.parametrize("m, n", [(1, 1), (1, 40), (3, 33), (1, 512), (0, 256), (3, 0)])
def test_odd_shapes_work_or_are_named_errors(quantizer: Quantizer, m: int, n: int) -> None:
    W = weights(7, m, n, dtype=torch.float32)
    try:
        grid = quantizer.fit(W)
    except FormatError as error:
        assert n % 8 and str(n) in str(error) or n % 256 and isinstance(quantizer, bakron.Gguf)
        return
    assert grid.group.shape == (n,) and grid.scale.shape == grid.zero.shape
    solution = solved(W, grid, 7)
    assert solution.weight.shape == (m, n) and bool(torch.isfinite(solution.weight).all())
    assert solution.certificate.worst < 1e-4


@every
def test_zero_rows_groups_and_weights(quantizer: Quantizer) -> None:
    W = weights(8, 6, width(quantizer), 0.05, torch.float32)
    W[1] = 0
    W[2, :64] = 0
    W[3, 1:] = 0
    values = rounded(quantizer, W)
    assert torch.equal(values[1:3][W[1:3] == 0], W[1:3][W[1:3] == 0])
    assert bool((values[3, 1:].abs() <= 0.75 * W[3, 0].abs()).all())
    assert solved(W, quantizer.fit(W), 8).certificate.worst < 1e-4
    nothing = torch.zeros_like(W)
    assert torch.equal(rounded(quantizer, nothing), nothing)


@every
@pytest.mark.parametrize("constant", [0.3, -40.0])
def test_constant_rows(quantizer: Quantizer, constant: float) -> None:
    W = weights(9, 3, width(quantizer), dtype=torch.float32)
    W[1] = constant
    values = rounded(quantizer, W)[1]
    assert bool(((values - constant).abs() <= 0.2 * abs(constant)).all())


@every
@pytest.mark.parametrize("power", [-110, 100])
def test_huge_and_tiny_weights_are_rounded_like_others_or_refused(quantizer: Quantizer, power: int) -> None:
    W = weights(10, 4, width(quantizer), dtype=torch.float32)
    scaled = W * 2.0**power
    try:
        values = rounded(quantizer, scaled)
    except FormatError as error:
        assert power > 0 and "fp16" in str(error)
        return
    alike = torch.equal(values, rounded(quantizer, W) * 2.0**power)
    assert alike or not values.any(), "neither the same codes nor, where scales are fp16, zero"
    assert solved(scaled, quantizer.fit(scaled), 10).certificate.worst < 1e-4


@every
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_non_finite_weights_are_refused(quantizer: Quantizer, bad: float) -> None:
    W = weights(11, 3, width(quantizer), dtype=torch.float32)
    W[1, 2] = bad
    with pytest.raises(NonFiniteError, match="weight"):
        quantizer.fit(W)
