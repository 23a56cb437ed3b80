"""How far a Hessian factor may be off because few sequences are behind it, and the damping that this calls for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bakron.core.spectrum import effective_rank


@dataclass
class Squares:
    """Σ_s ‖h_s‖²_F over independent terms h_s, each of them the sum of so many successive ``parts``."""

    parts: int = 1
    total: Tensor | float = 0.0
    _seen: int = 0
    _pending: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """One more part, kept until its term is whole."""
        self._pending = part if self._pending is None else self._pending + part
        self._seen += 1
        if self._seen % self.parts == 0:
            self.total = self.total + torch.linalg.vector_norm(self._pending, dtype=torch.float64).square()
            self._pending = None

    @property
    def whole(self) -> Tensor:
        """``total`` as a float64 tensor (1,)."""
        return torch.as_tensor(self.total, dtype=torch.float64).reshape(1)


def relative_error(H: Tensor, squares: float, n: int) -> float:
    """√(E‖H − E H‖²_F)/‖H‖_F, estimated, of H = Σ_s h_s / N with n independent PSD terms h_s; squares: Σ_s ‖h_s‖²_F / N².

    Between 0 and 1: PSD terms have no negative inner products.  1, nothing being known, for one term and for H = 0.

    >>> a, b = torch.diag(torch.tensor([2.0, 0.0])), torch.diag(torch.tensor([0.0, 2.0]))
    >>> round(relative_error((a + b) / 2, 2.0, 2), 6), relative_error(a, 2.0, 2)
    (1.0, 0.0)
    """
    whole = float(torch.linalg.vector_norm(H, dtype=torch.float64)) ** 2
    if n < 2 or not whole:
        return 1.0
    return math.sqrt(min(max((squares / whole - 1 / n) * n / (n - 1), 0.0), 1.0))


def damping_for(H: Tensor, error: float) -> float:
    """The multiple λ of the mean diagonal μ for which H + λμI has, up to scale, the least expected squared error.

    Of (1 − α)H + αμI it is α = E‖H − E H‖²_F / ‖H − μI‖²_F (Ledoit and Wolf, J. Multivariate Anal. 88, 2004), in terms of
    the relative ``error`` and the effective rank error²/(1 − rank/n), and λ = α/(1 − α).  Infinite, so that the other side
    alone is left, from α = 1.
    """
    beyond = 1 - effective_rank(H) / len(H)
    return error**2 / (beyond - error**2) if beyond > error**2 else math.inf
