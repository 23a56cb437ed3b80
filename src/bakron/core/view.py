"""What an estimator may see of a decoder block on one sequence beyond one linear: plain tensors and names, no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MlpView:
    """y = down·(act(gate·x) ∘ (up·x)), or y = down·act(up·x) where there is no gate.

    up, gate, down: names of linears.  up_output, gate_output: (T, f), biases included.  act: elementwise.
    gram_down: DᵀD (f, f) of down's weight.  All float32.
    """

    up: str
    gate: str | None
    down: str
    up_output: Tensor
    gate_output: Tensor | None
    act: Callable[[Tensor], Tensor]
    gram_down: Tensor


@dataclass(frozen=True)
class AttentionView:
    """y = o·concat_h(P_h V_k), P_h = softmax(scale · Q_h K_kᵀ) over the visible positions; k = h // group is h's key head.

    q, k, v, o: names of linears.  Q (H, T, c) and K (H/group, T, c): rotated queries and keys.  visible (T, T) bool:
    whether a query (row) sees a key (column), in each row and column one run of positions.
    cos, sin (T, c): of the rotation R_t, see ``rotate``.  weight_o (d, H·c): of o.  All float32.
    """

    q: str
    k: str
    v: str
    o: str
    Q: Tensor
    K: Tensor
    visible: Tensor
    scale: float
    cos: Tensor
    sin: Tensor
    weight_o: Tensor

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return len(self.Q) // len(self.K)

    def probabilities(self, h: int) -> Tensor:
        """P_h (T, T)."""
        scores = self.scale * self.Q[h] @ self.K[h // self.group].T
        return scores.masked_fill(~self.visible, -torch.inf).softmax(1)


@dataclass(frozen=True)
class BlockView:
    """inputs: x (T, d_in) of every linear by name.  mlp, attention: None where they were not asked for."""

    inputs: Mapping[str, Tensor]
    mlp: MlpView | None
    attention: AttentionView | None


def rotate(v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``R v = cos ∘ v + sin ∘ (−v₂, v₁)`` of v = (v₁, v₂) along the last dimension: rotary positions."""
    first, second = v.chunk(2, -1)
    return v * cos + torch.cat((-second, first), -1) * sin


def unrotate(v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``Rᵀ v``, the transpose of ``rotate``."""
    first, second = (v * sin).chunk(2, -1)
    return v * cos + torch.cat((second, -first), -1)
