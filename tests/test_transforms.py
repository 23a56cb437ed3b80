"""Claims of bakron.core.transforms: rotations are orthogonal, spread, and drawn by seed; scales balance two matrices.

Kinds: oracle (the matrix formed, Kronecker products), property, behaviour.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bakron.core.transforms import balance, rotation


def matrix(n: int, seed: int = 0, **options: bool) -> Tensor:
    """Q (n, n): its columns are what the rotation makes of the unit vectors."""
    return rotation(n, torch.Generator().manual_seed(seed), **options)(torch.eye(n, dtype=torch.float64)).T


@pytest.mark.parametrize("keep_mean", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 12, 20, 28, 36, 64, 94, 96, 576, 896])
def test_every_size_has_an_orthogonal_matrix(n: int, keep_mean: bool) -> None:
    Q = matrix(n, keep_mean=keep_mean)
    torch.testing.assert_close(Q @ Q.T, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-12)
    if keep_mean:
        ones = torch.ones(n, dtype=torch.float64)
        torch.testing.assert_close(Q @ ones, ones, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [2, 12, 20, 64, 96, 128, 576, 768, 896, 960, 1536, 1600, 2048])
def test_widths_of_real_models_have_hadamard_matrices(n: int) -> None:
    """All entries of Q are ±1/√n, so that a single large channel is spread over all others evenly."""
    drawn = rotation(n, torch.Generator().manual_seed(0))
    columns = drawn(torch.eye(n, dtype=torch.float64)[:64])
    torch.testing.assert_close(columns.abs(), torch.full_like(columns, n**-0.5), rtol=1e-9, atol=0)


def test_a_rotation_is_the_product_of_its_parts() -> None:
    drawn = rotation(24, torch.Generator().manual_seed(3))
    assert len(drawn.base) == 12
    sylvester = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    Q = torch.kron(drawn.base, sylvester) * drawn.signs
    X = torch.randn(5, 3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(drawn(X), X @ Q.T)
    assert drawn(X.float()).dtype == torch.float32


def test_the_seed_decides() -> None:
    assert torch.equal(matrix(28, 1), matrix(28, 1))
    assert not torch.equal(matrix(28, 1), matrix(28, 2))


def test_balanced_channels_have_equal_norms_and_no_other_scales_bound_the_error_lower() -> None:
    generator = torch.Generator().manual_seed(0)
    written, read = (torch.rand(16, generator=generator, dtype=torch.float64) + 0.01 for _ in range(2))
    D = balance(written, read)
    torch.testing.assert_close(D * written, read / D)

    def bound(D: Tensor) -> float:
        return float((D * written).square().sum() * (read / D).square().sum())

    assert bound(D) < bound(torch.ones(16, dtype=torch.float64))
    for _ in range(20):
        other = D * (1 + 0.1 * torch.randn(16, generator=generator, dtype=torch.float64))
        assert bound(D) <= bound(other)
    assert balance(torch.tensor([0.0, 2.0]), torch.tensor([3.0, 0.0])).tolist() == [1.0, 1.0]
