"""Claims about the allocation: it is the best one, by brute force; the budget holds; and it scales to large models.

Kinds: oracle, property, behaviour.
"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakron.core.allocation import allocate
from bakron.errors import ConfigError, ShapeError


def brute_force(losses: list[list[float]], costs: list[list[int]], budget: int) -> tuple[float, int]:
    """Least loss, and the least cost at which it can be had."""
    best = (float("inf"), 0)
    for choice in itertools.product(*(range(len(item)) for item in losses)):
        cost = sum(item[j] for item, j in zip(costs, choice, strict=True))
        if cost <= budget:
            best = min(best, (sum(item[j] for item, j in zip(losses, choice, strict=True)), cost))
    return best


def totals(losses: list[list[float]], costs: list[list[int]], choice: list[int]) -> tuple[float, int]:
    return (
        sum(item[j] for item, j in zip(losses, choice, strict=True)),
        sum(item[j] for item, j in zip(costs, choice, strict=True)),
    )


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]], int]:
    """Up to six items of up to four candidates; whole losses make ties, falling ones are what quantizers have."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    whole = st.integers(0, 9).map(float)
    loss = draw(st.sampled_from([whole, st.floats(0, 1), st.floats(0, 1e-9), st.floats(0, 1e9)]))
    losses = [draw(st.lists(loss, min_size=n, max_size=n)) for n in sizes]
    costs = [draw(st.lists(st.integers(0, 30), min_size=n, max_size=n)) for n in sizes]
    if draw(st.booleans()):
        losses, costs = [sorted(item, reverse=True) for item in losses], [sorted(item) for item in costs]
    cheapest, dearest = sum(map(min, costs)), sum(map(max, costs))
    return losses, costs, draw(st.integers(cheapest, dearest + 2))


@given(instances())
def test_it_is_the_best_of_all_choices(instance: tuple[list[list[float]], list[list[int]], int]) -> None:
    losses, costs, budget = instance
    loss, cost = totals(losses, costs, allocate(*instance))
    best, _ = brute_force(*instance)
    assert cost <= budget
    assert loss == pytest.approx(best, rel=1e-12, abs=0)


@given(instances())
def test_among_equal_ones_it_is_the_cheapest(
    instance: tuple[list[list[float]], list[list[int]], int],
) -> None:
    losses, costs, budget = instance
    losses = [[float(round(loss)) for loss in item] for item in losses]  # exact sums
    assert totals(losses, costs, allocate(losses, costs, budget)) == brute_force(losses, costs, budget)


@given(instances(), st.sampled_from([1e-30, 0.5, 1e20]))
def test_the_units_of_losses_do_not_matter(
    instance: tuple[list[list[float]], list[list[int]], int], unit: float
) -> None:
    losses, costs, budget = instance
    scaled = [[loss * unit for loss in item] for item in losses]
    loss, _ = totals(scaled, costs, allocate(scaled, costs, budget))
    assert loss == pytest.approx(brute_force(scaled, costs, budget)[0], rel=1e-12, abs=0)


def test_more_budget_never_loses_more() -> None:
    chance = random.Random(0)
    losses = [sorted((chance.random() for _ in range(3)), reverse=True) for _ in range(20)]
    costs = [[size * bits for bits in (2, 3, 4)] for size in (chance.randint(5, 40) for _ in range(20))]
    cheapest, dearest = sum(map(min, costs)), sum(map(max, costs))
    seen = [
        totals(losses, costs, allocate(losses, costs, b)) for b in [*range(cheapest, dearest, 13), dearest]
    ]
    assert all(later[0] <= earlier[0] for earlier, later in itertools.pairwise(seen))
    assert seen[0][1] == cheapest and seen[-1][0] == pytest.approx(sum(item[-1] for item in losses))


@pytest.mark.parametrize("odd", [False, True])
def test_a_large_model_takes_little(odd: bool) -> None:
    """80 blocks of 4 sets, 4 bit widths and 2 group sizes; ``odd`` sizes have no common divisor."""
    chance = random.Random(1)
    losses, costs = [], []
    for _ in range(80):
        for size in (10_240 * 8192, 8192 * 8192, 57_344 * 8192, 28_672 * 8192):
            size += chance.randint(0, 10_000) if odd else 0
            scale = size * chance.lognormvariate(0, 1.5)
            candidates = [(bits, group) for bits in (2, 3, 4, 8) for group in (64, 128)]
            losses.append([scale * 4.0**-bits * (group / 128) ** 0.3 for bits, group in candidates])
            costs.append([size * bits // 8 + 2 * size // group for bits, group in candidates])
    budget = sum(item[2] for item in costs)  # as much as 3 bits in groups of 64
    loss, cost = totals(losses, costs, allocate(losses, costs, budget))
    assert 0.9999 * budget < cost <= budget
    assert loss < 0.9 * sum(item[2] for item in losses)


def test_nothing_to_choose() -> None:
    assert allocate([], [], 0) == []
    assert allocate([[1.0], [2.0]], [[3], [4]], 7) == [0, 0]
    assert allocate([[0.0, 0.0]], [[5, 3]], 10) == [1]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget: 4 is less than 5"):
        allocate([[1.0, 0.0], [1.0]], [[2, 9], [3]], 4)
    with pytest.raises(ShapeError, match="item 1"):
        allocate([[1.0], [1.0, 2.0]], [[1], [1]], 4)
    with pytest.raises(ConfigError, match=r"item 0.*nan"):
        allocate([[float("nan")]], [[1]], 4)
