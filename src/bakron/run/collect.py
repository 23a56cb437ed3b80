"""First stage: boundary states of the original model, and from them each block's Hessian factors, one block at a time.

One forward over all sequences stores the state that enters every block; one backward, block by block from the last,
re-runs each block from its stored state. Only the factors of a single block are ever in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bakron.errors import NonFiniteError
from bakron.estimators import Estimator, get_estimator
from bakron.models import Decoder
from bakron.run.progress import Progress, stage
from bakron.run.store import Store

HEAD_CHUNK = 256  # tokens whose logits are in memory at once


@dataclass(frozen=True)
class Need:
    """What the solve will read: an estimator's H_in and gradient statistics, and the original states of all blocks."""

    estimator: str
    boundaries: bool
    H_in: bool
    gradients: bool


def boundary(b: int) -> str:
    """The piece that holds the states (tokens, d) entering block b, sequence after sequence."""
    return f"boundaries/{b:04d}"


def factors(need: Need, b: int) -> str:
    """The piece that holds the factors of block b: ``<linear>.H_in`` if needed, ``.H_out``, ``.token_weights``."""
    return f"factors/{need.estimator}{'+H_in' if need.H_in else ''}/{b:04d}"


def _gradient(b: int) -> str:
    return f"gradients/{b:04d}"


def collect(
    decoder: Decoder,
    sequences: Sequence[Tensor],
    need: Need,
    store: Store,
    seed: int,
    progress: Progress,
) -> None:
    """Fill ``store`` with what ``need`` says; finished pieces are kept. Raises NonFiniteError naming block and sequence."""
    forward_factors = need.H_in and not need.gradients
    _embed(decoder, sequences, store)
    if need.boundaries or need.gradients or forward_factors:
        _forward(decoder, sequences, need if forward_factors else None, store, progress)
    if need.gradients and not all(store.has(factors(need, b)) for b in range(decoder.n_blocks)):
        _head_gradients(decoder, sequences, need, store, seed, progress)
        _backward(decoder, sequences, need, store, progress)


def check_finite(states: Tensor, what: str, index: int) -> None:
    """Raise NonFiniteError naming ``what`` and the calibration sequence when ``states`` hold NaN or infinities."""
    if not torch.isfinite(states).all():
        raise NonFiniteError(
            f"{what}, calibration sequence {index}: NaN or infinite values. The model overflows in {states.dtype}: "
            "use dtype float32, or leave this sequence out."
        )


def _embed(decoder: Decoder, sequences: Sequence[Tensor], store: Store) -> None:
    if not store.has(boundary(0)):
        states = [decoder.embed(ids.to(decoder.device)) for ids in sequences]
        store.save(boundary(0), {"h": torch.cat(states)})


def _forward(
    decoder: Decoder,
    sequences: Sequence[Tensor],
    need: Need | None,
    store: Store,
    progress: Progress,
) -> None:
    """Store the states that enter each block, and on the way the factors if they ``need`` no gradients."""
    lengths = [len(ids) for ids in sequences]
    with stage(progress, "forward through the original model", decoder.n_blocks * len(sequences)):
        states = None
        for b in range(decoder.n_blocks):
            if store.has(boundary(b + 1)) and (need is None or store.has(factors(need, b))):
                progress.advance(len(sequences))
                states = None
                continue
            states = load_states(store, boundary(b), lengths, decoder) if states is None else states
            sums = _Sums(decoder, b, get_estimator(need.estimator), True) if need else None
            for index, h in enumerate(states):
                if sums:
                    states[index], inputs = decoder.run_block_capturing(b, h)
                    for spec in decoder.linears[b]:
                        sums.add(spec.name, inputs[spec.name], None)
                else:
                    with torch.no_grad():
                        states[index] = decoder.run_block(b, h)
                check_finite(states[index], f"block {b}", index)
                progress.advance()
            if sums and need:
                store.save(factors(need, b), *sums.finish(len(sequences), sum(lengths)))
            store.save(boundary(b + 1), {"h": torch.cat(states)})


def _head_gradients(
    decoder: Decoder, sequences: Sequence[Tensor], need: Need, store: Store, seed: int, progress: Progress
) -> None:
    """∂ℓ/∂h after the last block, ℓ = −Σ_t log p(ŷ_t), ŷ sampled from the model's own distribution."""
    last = decoder.n_blocks
    if store.has(_gradient(last)) or store.has(factors(need, last - 1)):
        return
    gradients = []
    lengths = [len(ids) for ids in sequences]
    with stage(progress, "labels and gradients at the head", len(sequences)):
        for index, h in enumerate(load_states(store, boundary(last), lengths, decoder)):
            generator = torch.Generator().manual_seed(1_000_003 * seed + index)
            gradient = torch.cat([_head_gradient(decoder, chunk, generator) for chunk in h.split(HEAD_CHUNK)])
            check_finite(gradient, "gradient at the head", index)
            gradients.append(gradient)
            progress.advance()
    store.save(_gradient(last), {"g": torch.cat(gradients)})


def _head_gradient(decoder: Decoder, h: Tensor, generator: torch.Generator) -> Tensor:
    with torch.enable_grad():
        h = h.detach().requires_grad_()
        log_p = decoder.tail(h).float().log_softmax(-1)
        return torch.autograd.grad(-log_p.gather(1, _sample(log_p.detach(), generator)).sum(), h)[0]


def _sample(log_p: Tensor, generator: torch.Generator) -> Tensor:
    """One label (t, 1) a row of log_p (t, V), by the inverse of the cumulative distribution."""
    cumulative = log_p.exp().cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(len(log_p), 1, generator=generator, dtype=torch.float64).to(log_p.device)
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp(
        max=log_p.shape[1] - 1
    )


def _backward(
    decoder: Decoder,
    sequences: Sequence[Tensor],
    need: Need,
    store: Store,
    progress: Progress,
) -> None:
    """Factors of every block from the last to the first, each from its stored states and the gradient behind it."""
    lengths = [len(ids) for ids in sequences]
    with stage(progress, "backward through the original model", decoder.n_blocks * len(sequences)):
        for b in reversed(range(decoder.n_blocks)):
            if store.has(factors(need, b)):
                progress.advance(len(sequences))
                continue
            states = load_states(store, boundary(b), lengths, decoder)
            gradients = list(store.load(_gradient(b + 1))["g"].to(decoder.device).split(lengths))
            sums = _Sums(decoder, b, get_estimator(need.estimator), need.H_in)
            for index, h in enumerate(states):
                gradients[index] = decoder.backward_block(b, h, gradients[index], sums.add)
                check_finite(gradients[index], f"gradient at block {b}", index)
                progress.advance()
            if b:
                store.save(_gradient(b), {"g": torch.cat(gradients)})
            store.save(factors(need, b), *sums.finish(len(sequences), sum(lengths)))
            store.remove(_gradient(b + 1))


@dataclass
class _Sums:
    """Float64 sums of an estimator's terms over the sequences, for the linears of one block."""

    decoder: Decoder
    b: int
    estimator: Estimator
    want_in: bool
    sums: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, x: Tensor, g: Tensor | None) -> None:
        """Add one sequence's terms for one linear, in float32 whatever the model computes in."""
        x, g = x.float(), None if g is None else g.float()
        first = next(group[0] for group in self.decoder.groups[self.b] if name in group)
        owner = first if self.estimator.shares_input else name
        term_in, term_out = self.estimator.terms(x, g, self.want_in and owner == name)
        for key, term in ((f"{name}.H_in", term_in), (f"{name}.H_out", term_out)):
            if term is None:
                continue
            if key not in self.sums:
                self.sums[key] = torch.zeros_like(term, dtype=torch.float64)
            self.sums[key] += term
        weights = self.estimator.token_weights(g)
        if weights is not None:
            self.weights.setdefault(f"{name}.token_weights", []).append(weights)

    def finish(self, n_sequences: int, n_tokens: int) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The means in float32, the token weights, and the counts."""
        count = n_tokens if self.estimator.per_token else n_sequences
        tensors = {key: (total / count).to(torch.float32) for key, total in self.sums.items()}
        tensors |= {key: torch.cat(parts) for key, parts in self.weights.items()}
        return tensors, {"n_sequences": n_sequences, "n_tokens": n_tokens}


def load_states(store: Store, piece: str, lengths: Sequence[int], decoder: Decoder) -> list[Tensor]:
    """The states that ``piece`` holds, one (T, d) tensor a sequence, on the decoder's device."""
    return list(store.load(piece)["h"].to(decoder.device).split(list(lengths)))
