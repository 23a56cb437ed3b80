"""Views of a decoder block for estimators that know its MLP and attention; blocks built otherwise are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bakron.core.linalg import gram
from bakron.core.view import AttentionView, BlockView, MlpView, rotate
from bakron.errors import ModelError
from bakron.models.families import ACTIVATION_NAMES, ATTENTION_LINEARS, MLP_LINEARS

if TYPE_CHECKING:
    from bakron.models.decoder import Decoder

CHECK_LENGTH = 32


class Viewer:
    """Runs block b of ``decoder`` and shows the parts of it that ``sees`` names: "mlp", "attention".

    Raises ModelError where the linears of a part cannot be told by their names.
    """

    def __init__(self, decoder: Decoder, b: int, sees: Sequence[str]) -> None:
        self.decoder, self.b, self.sees = decoder, b, sees
        if "mlp" in sees:
            self.up, self.gate, self.down = self._mlp_linears()
        if "attention" in sees:
            self.q, self.k, self.v, self.o = self._attention_linears()

    def run(self, h: Tensor) -> tuple[Tensor, BlockView]:
        """The block on the hidden state h (T, d), without gradients: its output (T, d), and the view."""
        h_out, xs, ys = self.decoder.run_block_capturing(self.b, h, outputs=True)
        mlp = self._mlp(ys, self._gram_down) if "mlp" in self.sees else None
        return h_out, BlockView(xs, mlp, self._attention(ys) if "attention" in self.sees else None)

    def check(self) -> None:
        """Raise ModelError unless the views' formulas give what the block computes, on a random hidden state."""
        decoder = self.decoder
        generator = torch.Generator().manual_seed(0)
        length = min(CHECK_LENGTH, decoder.max_length)
        h = torch.randn(length, decoder.hidden_size, generator=generator).to(decoder.device, decoder.dtype)
        _, xs, ys = decoder.run_block_capturing(self.b, h, outputs=True)
        if "mlp" in self.sees:
            mlp = self._mlp(ys, torch.empty(0))
            up, gate = mlp.up_output, mlp.gate_output
            hidden = mlp.act(up) if gate is None else mlp.act(gate) * up
            self._require_near(hidden, xs[self.down], "MLP", f"act(gate)·up before {self.down}", "")
        if "attention" in self.sees:
            view = self._attention(ys)
            if not (_one_run(view.visible) and _one_run(view.visible.T)):
                raise self._refusal("attention", "sees other positions than one run of them", "mlp_local, ")
            V = _heads(ys[self.v], view.K.shape[2]).float()
            mixed = [view.probabilities(i) @ V[i // view.group] for i in range(len(view.Q))]
            what = f"softmax(scale·QKᵀ)V of rotated queries and keys before {self.o}"
            self._require_near(torch.cat(mixed, 1), xs[self.o], "attention", what, "mlp_local, ")

    def _mlp_linears(self) -> tuple[str, str | None, str]:
        found = [match for names in MLP_LINEARS for match in self._siblings(names)]
        if len(found) != 1:
            known = " or ".join(", ".join(filter(None, names)) for names in MLP_LINEARS)
            raise self._refusal("MLP", f"has {len(found)} modules of the linears {known}, expected one", "")
        up, down, *gate = found[0]
        return up, gate[0] if gate else None, down

    def _attention_linears(self) -> tuple[str, ...]:
        found = self._siblings(ATTENTION_LINEARS)
        if len(found) != 1:
            known = ", ".join(ATTENTION_LINEARS)
            what = f"has {len(found)} modules of the separate linears {known}, expected one"
            raise self._refusal("attention", what, "mlp_local, ")
        return found[0]

    def _siblings(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """The linears so called of each module that has these and no others."""
        children: dict[str, set[str]] = {}
        for spec in self.decoder.linears[self.b]:
            parent, _, child = spec.name.rpartition(".")
            children.setdefault(parent, set()).add(child)
        return [
            tuple(f"{parent}.{name}" for name in names) for parent, of in children.items() if of == set(names)
        ]

    @cached_property
    def _gram_down(self) -> Tensor:
        return gram(self.decoder.get_weight(self.down))

    @cached_property
    def _weight_o(self) -> Tensor:
        return self.decoder.get_weight(self.o)

    def _mlp(self, ys: Mapping[str, Tensor], gram_down: Tensor) -> MlpView:
        parent = self.decoder.model.get_submodule(self.down.rpartition(".")[0])
        act = next((getattr(parent, name) for name in ACTIVATION_NAMES if hasattr(parent, name)), None)
        if act is None:
            raise self._refusal("MLP", f"has no activation called {' or '.join(ACTIVATION_NAMES)}", "")
        gate = None if self.gate is None else ys[self.gate].float()
        return MlpView(self.up, self.gate, self.down, ys[self.up].float(), gate, act, gram_down)

    def _attention(self, ys: Mapping[str, Tensor]) -> AttentionView:
        decoder, length = self.decoder, len(ys[self.q])
        parent = decoder.model.get_submodule(self.q.rpartition(".")[0])
        arguments = decoder.arguments(self.b, length)
        width = getattr(parent, "head_dim", None)
        cos, sin = (part[0] for part in arguments.get("position_embeddings") or ([None], [None]))
        if not isinstance(width, int) or cos is None or cos.shape != (length, width):
            raise self._refusal("attention", "has no rotary positions over whole heads", "mlp_local, ")
        return AttentionView(
            self.q,
            self.k,
            self.v,
            self.o,
            Q=rotate(_heads(ys[self.q], width), cos, sin).float(),  # with the model's own rounding
            K=rotate(_heads(ys[self.k], width), cos, sin).float(),
            visible=_visible(arguments.get("attention_mask"), length, decoder.device),
            scale=float(getattr(parent, "scaling", width**-0.5)),
            cos=cos.float(),
            sin=sin.float(),
            weight_o=self._weight_o,
        )

    def _require_near(self, seen: Tensor, expected: Tensor, part: str, what: str, other: str) -> None:
        expected = expected.float()
        miss = float((seen - expected).norm() / expected.norm())
        if not miss <= 16 * torch.finfo(self.decoder.dtype).eps + 1e-4:
            raise self._refusal(part, f"is not {what} (off by {miss:.2g} of its norm)", other)

    def _refusal(self, part: str, what: str, other: str) -> ModelError:
        return ModelError(
            f"{self.decoder.root}.{self.b}: its {part} {what}, so a local estimator knows no formula for it. "
            f"Choose estimator {other}shampoo, kfac or gram."
        )


def check_views(decoder: Decoder, sees: Sequence[str]) -> None:
    """Raise ModelError, naming the first block, unless every block of ``decoder`` can be seen so."""
    for b in range(decoder.n_blocks):
        Viewer(decoder, b, sees).check()


def _heads(y: Tensor, width: int) -> Tensor:
    """y (T, H·c) as (H, T, c)."""
    return y.view(len(y), -1, width).transpose(0, 1)


def _visible(mask: Tensor | None, length: int, device: torch.device) -> Tensor:
    """(T, T) bool of a block's attention mask, which is boolean or added to the scores; None is causal."""
    if mask is None:
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()
    mask = mask[0, 0, :, :length]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _one_run(visible: Tensor) -> bool:
    """Whether the true entries of each row are one run, and at least one."""
    starts = visible.int().diff(dim=1, prepend=visible.new_zeros(len(visible), 1).int()) == 1
    return bool((starts.sum(1) == 1).all())
