"""Claims: scaling by powers of two is exact over the whole range, a search keeps the first of the best."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bakron.core.groups import least_error, shift, split


@pytest.mark.parametrize("dtype, top", [(torch.float32, 126), (torch.float64, 1022)])
def test_powers_of_two_are_exact(dtype: torch.dtype, top: int) -> None:
    mantissa = torch.from_numpy(np.random.default_rng(0).uniform(0.5, 1, 200)).to(dtype)
    exponent = torch.linspace(-top, top, 200).round().int()
    big = shift(mantissa, exponent)
    assert torch.equal(big, torch.from_numpy(np.ldexp(mantissa.numpy(), exponent.numpy())))
    assert torch.equal(shift(big, -exponent), mantissa)


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1.0, 3e38])
def test_groups_have_magnitudes_below_one_and_are_restored(magnitude: float) -> None:
    W = torch.tensor([[1, -0.5, 0, 1, 0.25], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]) * magnitude
    groups = split(W, 3)
    assert groups.shape == (3, 2) and groups.group.tolist() == [0, 0, 0, 1, 1]
    largest = groups.values.abs().amax(1)
    assert bool(((largest >= 0.5) & (largest < 1) | (largest == 0)).all())
    assert torch.equal(groups.restored(groups.values).view(3, 6)[:, :5], W)
    assert not groups.values.view(3, 6)[:, 5].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
def test_storable_scales_are_those_of_the_dtype(dtype: torch.dtype | None) -> None:
    W = torch.from_numpy(np.random.default_rng(1).standard_normal((40, 6))).float()
    W[0] = 0
    groups = split(W, 3)
    largest = groups.values.abs().amax(1)
    scale = groups.restored(groups.storable(0.3 * largest, dtype))
    wanted = groups.restored(0.3 * largest)
    assert torch.equal(scale, torch.where(wanted > 0, wanted.to(dtype or torch.float32).float(), 1.0))


def test_the_first_of_the_best_candidates_is_kept() -> None:
    errors = [torch.tensor([2.0, 1.0, 3.0]), torch.tensor([2.0, 0.5, 4.0]), torch.tensor([1.0, 0.5, 3.0])]
    candidates = ((torch.full((3,), float(k)), torch.full((3, 2), 10 * k)) for k in range(3))
    one, two = least_error(candidates, lambda a, b: errors[int(a[0])])
    assert one.tolist() == [2, 1, 0] and two.tolist() == [[20, 20], [10, 10], [0, 0]]
