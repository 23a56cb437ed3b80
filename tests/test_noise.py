"""Claims about the noise of a factor that few sequences are behind.

1. ``relative_error`` is the usual estimate of a mean's variance from its terms, and is right on average.
2. ``damping_for`` leaves the least squared error on average: more or less damping is worse, and noise alone gets all of it.

Kinds: oracle, statistical with fixed seeds, property.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bakron.core.noise import Squares, damping_for, relative_error

N, SIZE, DRAWS = 6, 8, 400
SCALES = torch.arange(1, SIZE + 1, dtype=torch.float64) ** -0.5


def terms(seed: int, rank: int = 3) -> Tensor:
    """N independent PSD matrices (N, SIZE, SIZE) whose mean is rank · diag(SCALES²)."""
    generator = torch.Generator().manual_seed(seed)
    G = torch.randn(N, SIZE, rank, generator=generator, dtype=torch.float64) * SCALES[:, None]
    return G @ G.mT


def error_of(h: Tensor) -> float:
    return relative_error(h.mean(0), float(h.square().sum()) / len(h) ** 2, len(h))


# 1. The error


@given(st.integers(0, 10**6), st.integers(1, 5))
def test_it_is_the_variance_between_the_terms(seed: int, rank: int) -> None:
    h = terms(seed, rank)
    variance = (h - h.mean(0)).square().sum() / (N - 1) / N
    assert error_of(h) == pytest.approx(float(variance.sqrt() / h.mean(0).norm()), rel=1e-9)


def test_it_is_right_on_average() -> None:
    draws = [terms(seed) for seed in range(DRAWS)]
    expected = 3 * torch.diag(SCALES**2)
    true = sum(float((h.mean(0) - expected).square().sum()) for h in draws)
    estimated = sum(error_of(h) ** 2 * float(h.mean(0).square().sum()) for h in draws)
    assert estimated == pytest.approx(true, rel=0.1)


def test_nothing_is_known_from_one_term_or_none() -> None:
    H = terms(0)[0]
    assert relative_error(H, float(H.square().sum()), 1) == 1
    assert relative_error(torch.zeros(3, 3), 0.0, 5) == 1


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_squares_are_those_of_whole_terms(parts: int) -> None:
    squares = Squares(parts)
    h = terms(1).float() * 1e-25  # whose squares are nothing in float32
    for part in h:
        squares.add(part)
    whole = h.double().view(N // parts, parts, SIZE, SIZE).sum(1)
    assert float(squares.total) == pytest.approx(float(whole.square().sum()), rel=1e-6)


# 2. The damping


def test_more_or_less_damping_is_worse_on_average() -> None:
    expected = 3 * torch.diag(SCALES**2)
    mean = torch.eye(SIZE, dtype=torch.float64)

    def miss(factor: float) -> float:
        total = 0.0
        for seed in range(DRAWS):
            h = terms(seed)
            H = h.mean(0)
            damping = factor * damping_for(H, error_of(h))
            share = damping / (1 + damping) if damping < math.inf else 1.0
            shrunk = (1 - share) * H + share * float(H.diagonal().mean()) * mean
            total += float((shrunk - expected).square().sum())
        return total

    best = miss(1)
    assert best < min(miss(0.4), miss(2.5)) and best < 0.8 * miss(0)


def test_noise_alone_is_damped_away() -> None:
    one = torch.outer(SCALES, SCALES)
    assert damping_for(one, 0.0) == 0
    assert damping_for(one, 1.0) == math.inf
    assert damping_for(torch.eye(5), 0.1) == math.inf  # the identity is what H is damped towards
    assert damping_for(one, 0.5) == pytest.approx(0.25 / (1 - _rank(one) / SIZE - 0.25))


def _rank(H: Tensor) -> float:
    return float(H.trace() ** 2 / H.square().sum())
