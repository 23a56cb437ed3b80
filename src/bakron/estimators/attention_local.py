"""``attention_local``: errors of scores and of the attention's output; ``mlp_local`` in the MLP ("FullyLocal"; BoA).

Query t sees keys s ∈ S_t; R_t is the rotation of position t, and k(h) the key head that query head h uses.

    q:  E of head h moves the score of (t, s) by (R_t E x_t)ᵀ k_s, so Σ_s |·|² = x_tᵀ Eᵀ M_t E x_t with
        M_t = R_tᵀ (Σ_{s ∈ S_t} k_s k_sᵀ) R_t: the Gram matrix of the (rotated) keys it sees, rotated back.
    k:  E of a key head moves it by q_tᵀ R_s E x_s for each query head h that uses it, so
        M_s = R_sᵀ (Σ_h Σ_{t: s ∈ S_t} q_t q_tᵀ) R_s.
    v:  E of a key head moves the output of t by Σ_h W_h E z_t^h, z_t^h = Σ_s P^h_ts x_s, W_h being the columns of o that
        belong to query head h. Products of different heads are left out: Σ_h (XᵀP_hᵀP_h X) ⊗ (W_hᵀW_h).

All M_t are block-diagonal over heads. The sums over tokens of q and k are factorised as in ``mlp_local``, that of v,
over tokens and heads, likewise: mean_h (XᵀP_hᵀP_h X) ⊗ Σ_h W_hᵀW_h, or with the traces as weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bakron.core.linalg import gram
from bakron.core.view import AttentionView, BlockView, unrotate
from bakron.estimators import Estimator
from bakron.estimators.mlp_local import MlpLocal


class AttentionLocal(MlpLocal):
    """``_Scores`` for q and k, ``_Values`` for v."""

    sees = ("mlp", "attention")

    def of(self, view: BlockView, name: str) -> Estimator:
        """What the linear ``name`` sums for this sequence."""
        attention = view.attention
        assert attention is not None
        if name in (attention.q, attention.k):
            x = view.inputs[name].float()
            weights = x.square().sum(1) if self.shampoo else x.new_ones(len(x))
            return _Scores(*_score_metric(attention, name, weights), self.shampoo)
        if name == attention.v:
            return _Values(attention, self.shampoo)
        return super().of(view, name)


@dataclass(frozen=True)
class _Scores:
    """q or k: H_out = Σ_t M_t, for shampoo Σ_t ‖x_t‖² M_t; traces: tr(M_t) (T,)."""

    H_out: Tensor
    traces: Tensor
    shampoo: bool
    needs_gradients = False
    shares_input = False
    per_token = True

    def terms(self, x: Tensor, g: Tensor | None, want_in: bool) -> tuple[Tensor | None, Tensor | None]:
        """Σ_t x_t x_tᵀ, for shampoo Σ_t tr(M_t) x_t x_tᵀ; and H_out."""
        weighted = x * self.traces.sqrt()[:, None] if self.shampoo else x
        return (gram(weighted) if want_in else None), self.H_out

    def token_weights(self, g: Tensor | None) -> Tensor | None:
        """tr(M_t) for shampoo, else all tokens weigh the same."""
        return self.traces if self.shampoo else None


def _score_metric(view: AttentionView, name: str, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_t w_t M_t (d_out, d_out) and tr(M_t) (T,) of q or k."""
    blocks, traces = [], torch.zeros_like(weights)
    for k, keys in enumerate(view.K):
        if name == view.q:
            M, copies = _metric_of_head(view, keys[None], view.visible), view.group
        else:
            queries = view.Q[k * view.group : (k + 1) * view.group]
            M, copies = _metric_of_head(view, queries, view.visible.T), 1
        blocks += [torch.tensordot(weights, M, 1)] * copies
        traces += copies * M.diagonal(dim1=1, dim2=2).sum(1)
    return torch.block_diag(*blocks), traces.clamp(min=0)


def _metric_of_head(view: AttentionView, vectors: Tensor, visible: Tensor) -> Tensor:
    """R_tᵀ (Σ_s v_s v_sᵀ) R_t (T, c, c), summed over the s that row t of ``visible`` names and over vectors (n, T, c)."""
    squares = torch.einsum("nsi,nsj->sij", vectors, vectors)
    summed = squares.cumsum(0, dtype=torch.float64)  # visible positions are one run: a difference of two sums
    first = visible.int().argmax(1)
    before = summed[first - 1] * (first > 0)[:, None, None]
    seen = (summed[first + visible.sum(1) - 1] - before).to(squares.dtype)
    cos, sin = view.cos[:, None], view.sin[:, None]
    return unrotate(unrotate(seen, cos, sin).transpose(1, 2), cos, sin)


@dataclass(frozen=True)
class _Values:
    """v: the tokens that the heads mix, and the columns of o behind them."""

    view: AttentionView
    shampoo: bool
    needs_gradients = False
    shares_input = False
    per_token = True

    def terms(self, x: Tensor, g: Tensor | None, want_in: bool) -> tuple[Tensor | None, Tensor | None]:
        """T·mean_h and T·Σ_h of the two sides; for shampoo Σ_h tr(W_hᵀW_h) XᵀP_hᵀP_h X and Σ_h tr(XᵀP_hᵀP_h X) W_hᵀW_h."""
        view = self.view
        width = view.Q.shape[2]
        H_in = x.new_zeros(x.shape[1], x.shape[1]) if want_in else None
        blocks = [x.new_zeros(width, width) for _ in view.K]
        for h, (scale, W) in enumerate(zip(self._scales(), view.weight_o.split(width, 1), strict=True)):
            mixed = view.probabilities(h) @ x if want_in or self.shampoo else x
            if H_in is not None:
                H_in += scale * gram(mixed)
            blocks[h // view.group] += gram(W) * (mixed.square().sum() if self.shampoo else len(x))
        return H_in, torch.block_diag(*blocks)

    def token_weights(self, g: Tensor | None) -> Tensor | None:
        """Σ_h c_h Σ_t P_ts²: of Σ_h c_h XᵀP_hᵀP_h X the terms of one token, kept for new inputs."""
        squares = (
            scale * self.view.probabilities(h).square().sum(0) for h, scale in enumerate(self._scales())
        )
        return torch.stack(list(squares)).sum(0)

    def _scales(self) -> list[float]:
        """c_h, the weight of each query head in H_in: tr(W_hᵀW_h) for shampoo, else 1/H."""
        n_heads, _, width = self.view.Q.shape
        if not self.shampoo:
            return [1 / n_heads] * n_heads
        return [float(W.square().sum()) for W in self.view.weight_o.split(width, 1)]


ESTIMATOR = AttentionLocal()
