"""Layers to measure solvers on: a random weight, two correlated Hessian factors, a fixed 4-bit grid; and their loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid

PERCDAMP = 0.01  # on either side, for every method
GROUP_SIZE = 128


@dataclass(frozen=True)
class Problem:
    """W (m, n), H_in (n, n), H_out (m, m) and scale (m, n_groups), all float32.

    Codes are the integers −8 … 7, column j belongs to group j // GROUP_SIZE, a weight is scale·code.
    """

    W: Tensor
    H_in: Tensor
    H_out: Tensor
    scale: Tensor

    @property
    def grid(self) -> ScalarGrid:
        """The grid as bakron takes it."""
        group = torch.arange(self.W.shape[1]) // GROUP_SIZE
        return ScalarGrid(torch.arange(-8.0, 8.0), self.scale, torch.zeros_like(self.scale), group)

    def losses(self, weight: Tensor) -> tuple[float, float]:
        """tr(H_out E H_in Eᵀ) and tr(E H_in Eᵀ) of E = weight − W on the undamped factors.

        Products in float32, sums in float64: good to about five digits.
        """
        E = weight - self.W
        right = E @ self.H_in
        one_sided = float((right * E).sum(dtype=torch.float64))
        return float((self.H_out @ right).mul_(E).sum(dtype=torch.float64)), one_sided

    def save(self, folder: Path) -> None:
        """Write the tensors as ``.npy`` files, for programs that run in processes of their own."""
        for name, tensor in vars(self).items():
            np.save(folder / f"{name}.npy", tensor.numpy())

    @staticmethod
    def load(folder: Path) -> Problem:
        """What ``save`` wrote."""
        names = ("W", "H_in", "H_out", "scale")
        return Problem(*(torch.from_numpy(np.load(folder / f"{name}.npy")) for name in names))


def make_problem(m: int, n: int) -> Problem:
    """The (m, n) problem, the same one every time, with min-max scales."""
    random = torch.Generator().manual_seed(1_000_003 * m + n)
    W = torch.randn(m, n, generator=random) * 0.02
    largest = [part.abs().amax(1) for part in W.split(GROUP_SIZE, 1)]
    scale = torch.stack(largest, 1) / 7.5  # as GPTQModel and llm-compressor choose it
    return Problem(W, _covariance(n, random), _covariance(m, random), scale)


def _covariance(size: int, random: torch.Generator) -> Tensor:
    """The covariance of x = s ∘ (Bᵀz + noise), z Gaussian of at most 256 dimensions, channel scales s log-normal."""
    rank = max(1, min(256, size // 4))
    B = torch.randn(rank, size, generator=random)
    B *= torch.arange(1, rank + 1)[:, None] ** -0.5
    B *= torch.exp(0.5 * torch.randn(size, generator=random))
    H = B.T @ B
    H.diagonal().mul_(1.3)
    return H
