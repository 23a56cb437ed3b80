"""``mlp_local``: the error at the MLP's output for the linears inside it, ``gram`` for all others (BaKron's "MlpLocal").

With D the weight of down, the MLP's output is D·h_t, h_t = act(gate·x_t) ∘ (up·x_t), or h_t = act(up·x_t) without gate.
An error E of a linear's weight moves h_t by a_t ∘ (E x_t) to first order, where

    up:    a_t = act(gate·x_t), exactly          gate:  a_t = (up·x_t) ∘ act′(gate·x_t)
    up without gate:  a_t = act′(up·x_t)

so the output moves by ‖D (a_t ∘ E x_t)‖² = x_tᵀ Eᵀ M_t E x_t, M_t = diag(a_t) DᵀD diag(a_t) = a_t a_tᵀ ∘ DᵀD: the
quadratic form of E[xxᵀ ⊗ M_t]. It is factorised as E[xxᵀ] ⊗ E[M_t] ("KFAC") here, and in ``mlp_local_shampoo``, where
each side is weighted by the other's trace, as E[tr(M_t) xxᵀ] ⊗ E[‖x‖² M_t].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bakron.core.linalg import gram
from bakron.core.view import BlockView, MlpView
from bakron.estimators import Estimator


@dataclass(frozen=True)
class MlpLocal:
    """shampoo: the factorisation that weights each side by the other's trace."""

    shampoo: bool = False
    needs_gradients = False
    shares_input = True
    per_token = True
    sees = ("mlp",)

    def of(self, view: BlockView, name: str) -> Estimator:
        """``_Hidden`` for up and gate, else this one."""
        assert view.mlp is not None
        slopes = _slopes(view.mlp, name)
        return self if slopes is None else _Hidden(slopes, view.mlp.gram_down, self.shampoo)

    def terms(self, x: Tensor, g: Tensor | None, want_in: bool) -> tuple[Tensor | None, Tensor | None]:
        """Σ_t x_t x_tᵀ, and nothing for H_out: the linear's output is what should not change."""
        return (gram(x) if want_in else None), None

    def token_weights(self, g: Tensor | None) -> Tensor | None:
        """All tokens weigh the same."""
        return None


@dataclass(frozen=True)
class _Hidden:
    """A linear of the MLP's hidden layer: a (T, f) as above, gram_down = DᵀD (f, f)."""

    a: Tensor
    gram_down: Tensor
    shampoo: bool
    needs_gradients = False
    per_token = True

    @property
    def shares_input(self) -> bool:
        """Whether H_in depends on x alone."""
        return not self.shampoo

    def terms(self, x: Tensor, g: Tensor | None, want_in: bool) -> tuple[Tensor | None, Tensor | None]:
        """Σ_t x_t x_tᵀ and Σ_t M_t; for shampoo Σ_t tr(M_t) x_t x_tᵀ and Σ_t ‖x_t‖² M_t."""
        weights = self.token_weights(None)
        if weights is None:
            return (gram(x) if want_in else None), gram(self.a) * self.gram_down
        H_in = gram(x * weights.sqrt()[:, None]) if want_in else None
        return H_in, gram(self.a * x.norm(dim=1, keepdim=True)) * self.gram_down

    def token_weights(self, g: Tensor | None) -> Tensor | None:
        """tr(M_t) for shampoo, else all tokens weigh the same."""
        return self.a.square() @ self.gram_down.diagonal() if self.shampoo else None


def _slopes(mlp: MlpView, name: str) -> Tensor | None:
    """a (T, f) of the linear ``name``; None for one that is not in front of the hidden layer."""
    if name == mlp.gate and mlp.gate_output is not None:
        return mlp.up_output * _derivative(mlp.act, mlp.gate_output)
    if name == mlp.up:
        return (
            mlp.act(mlp.gate_output) if mlp.gate_output is not None else _derivative(mlp.act, mlp.up_output)
        )
    return None


def _derivative(act: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """act′ at each entry of z."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        return torch.autograd.grad(act(z).sum(), z)[0]


ESTIMATOR = MlpLocal()
