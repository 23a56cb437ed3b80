"""The mathematics of function-preserving transforms: fast orthogonal matrices, and scales that balance two factors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

TRANSFORMS = ("fold", "rotate", "heads", "rescale")  # in the order in which they are applied
ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Rotation:
    """The orthogonal (n, n) matrix Q = (I − 2 v vᵀ) (B ⊗ Sylvester(n/m)/√(n/m)) diag(signs), never formed.

    base: B, orthogonal (m, m), n/m a power of two.  signs: (n,) of ±1.  mirror: v, a unit vector (n,), or None for no
    reflection.  All float64.
    """

    base: Tensor
    signs: Tensor
    mirror: Tensor | None = None

    def __call__(self, X: Tensor) -> Tensor:
        """Q x of every row x of X (..., n), computed in float64, in X's dtype."""
        rows = X.reshape(-1, len(self.signs))
        return torch.cat([self._rows(part).to(X.dtype) for part in rows.split(ROWS_AT_ONCE)]).view(X.shape)

    def _rows(self, X: Tensor) -> Tensor:
        m, n = len(self.base), len(self.signs)
        Y = self.base.to(X.device) @ (X.double() * self.signs.to(X.device)).view(-1, m, n // m)
        half = 1
        while half < n // m:
            a, b = Y.view(-1, 2, half).unbind(1)
            Y = torch.stack([a + b, a - b], 1)
            half *= 2
        Y = Y.view(-1, n) / (n // m) ** 0.5
        if self.mirror is None:
            return Y
        v = self.mirror.to(X.device)
        return Y - 2 * (Y @ v)[:, None] * v


def rotation(n: int, generator: torch.Generator, keep_mean: bool = False) -> Rotation:
    """A random rotation of size n ≥ 1: a Hadamard matrix with random signs where one of order n is known, which makes
    all entries ±1/√n; else a random orthogonal matrix of the odd part of n in place of the unknown factor.

    keep_mean: it also maps the vector of ones to itself, and so keeps the mean of what it rotates (for LayerNorm).

    >>> Q = rotation(12, torch.Generator().manual_seed(0))(torch.eye(12, dtype=torch.float64)).T
    >>> bool(torch.allclose(Q @ Q.T, torch.eye(12, dtype=torch.float64)))
    True
    """
    signs = 2.0 * torch.randint(0, 2, (n,), generator=generator) - 1.0
    drawn = Rotation(_base(n, generator), signs.double())
    if not keep_mean:
        return drawn
    ones = torch.full((n,), n**-0.5, dtype=torch.float64)
    v = drawn(ones) - ones
    return drawn if float(v.norm()) < 1e-12 else replace(drawn, mirror=v / v.norm())


def _base(n: int, generator: torch.Generator) -> Tensor:
    """An orthogonal (m, m) float64 matrix, n/m a power of two: Hadamard if Paley's construction gives one, else random."""
    odd = n // (n & -n)
    if odd == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    m = 4 * odd
    while n % m == 0:
        if _is_prime(m - 1):
            return _paley(m) / m**0.5
        m *= 2
    Q, R = torch.linalg.qr(torch.randn(odd, odd, dtype=torch.float64, generator=generator))
    return Q * R.diagonal().sign()


def _paley(order: int) -> Tensor:
    """The Hadamard matrix of ``order`` q + 1, q ≡ 3 mod 4 prime (Paley 1933): I + S, S skew, of Legendre symbols."""
    q = order - 1
    symbol = -torch.ones(q, dtype=torch.float64)
    symbol[torch.arange(q) ** 2 % q] = 1.0
    symbol[0] = 0.0
    index = torch.arange(q)
    H = torch.eye(order, dtype=torch.float64)
    H[0, 1:] += 1.0
    H[1:, 0] -= 1.0
    H[1:, 1:] += symbol[(index[None, :] - index[:, None]) % q]
    return H


def _is_prime(q: int) -> bool:
    return q > 1 and all(q % p for p in range(2, int(q**0.5) + 1))


def balance(written: Tensor, read: Tensor) -> Tensor:
    """The scales D (n,) that balance n channels: √(read/written), 1 where a channel is not written or not read.

    written, read: (n,) norms ≥ 0 of each channel's row in the matrix W₁ that writes it and of its column in the matrix W₂
    that reads it.  D W₁ and W₂ D⁻¹ then have equal norms in each channel; D minimises
    (Σ D² written²)(Σ read²/D²), a bound of the error that a common step over all columns of W₂ makes, when inputs
    are as large as the rows that write them (the equalisation of Nagel et al., arXiv 1906.04721).

    >>> balance(torch.tensor([4.0, 1.0]), torch.tensor([1.0, 0.0])).tolist()
    [0.5, 1.0]
    """
    scale = (read / written).sqrt()
    return torch.where((read > 0) & (written > 0), scale, torch.ones_like(scale))
