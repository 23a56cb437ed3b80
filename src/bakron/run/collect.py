"""First stage: boundary states of the original model, and from them each block's Hessian factors, one block at a time.

One forward over all sequences stores the state that enters every block; a backward for each pass of the estimator that
needs gradients, block by block from the last, re-runs each block from its stored state. Only the factors of a single
block are ever in memory. Each rank runs its share of the sequences; what it makes is joined or added up on the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bakron.core.noise import Squares
from bakron.core.packed import pack
from bakron.core.view import BlockView
from bakron.data import fingerprint
from bakron.errors import NonFiniteError
from bakron.estimators import Estimator, Iterated, Local, get_estimator, number_of_passes
from bakron.models import Decoder, Viewer
from bakron.run.factors import LAYOUT, unpacked
from bakron.run.progress import Progress, stage
from bakron.run.ranks import ALONE, Ranks
from bakron.run.store import Store

REPLAY_CHECKED = (
    512  # tokens of the first sequence on which blocks run by themselves are compared with the model
)
HEAD_CHUNK = 256  # tokens whose logits are in memory at once


@dataclass(frozen=True)
class Need:
    """What the solve will read: an estimator's H_in and gradient statistics, and the original states of all blocks.

    labels: of the loss: "model" draws them from the model's own distribution, "data" takes the text's next tokens.
    label_samples: how many are drawn for each token, each with a backward pass of its own.
    """

    estimator: str
    boundaries: bool
    H_in: bool
    gradients: bool
    labels: str = "model"
    label_samples: int = 1

    @property
    def factors(self) -> bool:
        """Whether there are any."""
        return self.H_in or self.H_out

    @property
    def H_out(self) -> bool:
        """Whether there is an H_out among them."""
        return self.gradients or isinstance(get_estimator(self.estimator), Local)

    @property
    def passes(self) -> int:
        """How many passes the estimator makes, the last of which leaves what the solve will read."""
        return number_of_passes(get_estimator(self.estimator))

    @property
    def source(self) -> str:
        """Whose factors, of which labels."""
        return self.estimator + (self.drawn if self.gradients else "")

    @property
    def drawn(self) -> str:
        """Which labels: nothing for the model's own, one drawn for each token."""
        if self.labels != "model":
            return f"+{self.labels}"
        return f"+{self.label_samples}labels" if self.label_samples > 1 else ""


def boundary(b: int) -> str:
    """The piece that holds the states (tokens, d) entering block b, sequence after sequence."""
    return f"boundaries/{b:04d}"


def factors(need: Need, b: int) -> str:
    """The piece that holds the factors of block b, in the layout of docs/hessians.md; ``.H_in`` only if needed."""
    return f"factors/{need.source}{'+H_in' if need.H_in else ''}/{b:04d}"


def _factors_after(need: Need, p: int, b: int) -> str:
    """The piece that holds the factors of block b as pass p leaves them."""
    return factors(need, b) if p == need.passes - 1 else f"passes/{need.source}/{p}/{b:04d}"


def _passed(store: Store, need: Need, p: int, b: int) -> bool:
    """Whether pass p is done with block b; a later pass removes what it left."""
    return any(store.has(_factors_after(need, later, b)) for later in range(p, need.passes))


def _drop_pass(store: Store, need: Need, p: int, b: int) -> None:
    """Remove what pass p left of block b, if there is such a pass; to be called when the next one is done with it."""
    if p >= 0:
        store.remove(_factors_after(need, p, b))


def _gradient(need: Need, b: int) -> str:
    """The piece that holds the gradients (tokens, d) at the states entering block b, for each sequence all its samples."""
    return f"gradients/{b:04d}{need.drawn}"


def collect(
    decoder: Decoder,
    sequences: Sequence[Tensor],
    need: Need,
    store: Store,
    seed: int,
    progress: Progress,
) -> None:
    """Fill ``store`` with what ``need`` says, together with all ranks of the store; finished pieces are kept.

    sequences: all of the run.  Raises NonFiniteError naming block and sequence, ModelError when blocks run by themselves are not the model's own.
    """
    in_forward = need.factors and not get_estimator(need.estimator).needs_gradients
    _embed(decoder, sequences, store)
    if need.boundaries or need.factors:
        _forward(decoder, sequences, need if in_forward else None, store, progress)
    if need.gradients and not all(store.has(factors(need, b)) for b in range(decoder.n_blocks)):
        _head_gradients(decoder, sequences, need, store, seed, progress)
        for p in range(1 if in_forward else 0, need.passes):
            _backward(decoder, sequences, need, p, store, progress)


def check_finite(states: Tensor, what: str, index: int) -> None:
    """Raise NonFiniteError naming ``what`` and the calibration sequence when ``states`` hold NaN or infinities."""
    if not torch.isfinite(states).all():
        raise NonFiniteError(
            f"{what}, calibration sequence {index}: NaN or infinite values. The model overflows in {states.dtype}: "
            "use dtype float32, or leave this sequence out."
        )


def _embed(decoder: Decoder, sequences: Sequence[Tensor], store: Store) -> None:
    if not store.has(boundary(0)):
        first = sequences[0][:REPLAY_CHECKED].to(decoder.device)
        store.ranks.from_first(lambda: decoder.check_replay(first))
        states = [decoder.embed(sequences[i].to(decoder.device)) for i in store.ranks.share(len(sequences))]
        store.save(boundary(0), store.ranks.joined({"h": states}))


def _forward(
    decoder: Decoder,
    sequences: Sequence[Tensor],
    need: Need | None,
    store: Store,
    progress: Progress,
) -> None:
    """Store the states that enter each block, and on the way the factors if their first pass ``need``s no gradients."""
    lengths, mine = [len(ids) for ids in sequences], store.ranks.share(len(sequences))
    with stage(progress, "forward through the original model", decoder.n_blocks * len(mine)):
        states = None
        for b in range(decoder.n_blocks):
            if store.has(boundary(b + 1)) and (need is None or _passed(store, need, 0, b)):
                progress.advance(len(mine))
                states = None
                continue
            states = load_states(store, boundary(b), lengths, decoder) if states is None else states
            sums = _Sums.of(decoder, need, 0, b, store) if need else None
            for i, h in enumerate(states):
                if sums:
                    states[i] = sums.run(h)
                else:
                    with torch.no_grad():
                        states[i] = decoder.run_block(b, h)
                check_finite(states[i], f"block {b}", mine[i])
                progress.advance()
            if sums and need:
                store.save(_factors_after(need, 0, b), *sums.finish(sequences))
            store.save(boundary(b + 1), store.ranks.joined({"h": states}))


def _head_gradients(
    decoder: Decoder, sequences: Sequence[Tensor], need: Need, store: Store, seed: int, progress: Progress
) -> None:
    """∂ℓ/∂h after the last block, ℓ = −Σ_t log p(ŷ_t), ŷ sampled from the model's own distribution or the text's own.

    Samples are successive draws of one generator for each sequence, so that more of them begin with fewer.
    """
    last = decoder.n_blocks
    if store.has(_gradient(need, last)) or store.has(factors(need, last - 1)):
        return
    gradients = []
    lengths, mine = [len(ids) for ids in sequences], store.ranks.share(len(sequences))
    with stage(progress, "labels and gradients at the head", len(mine)):
        for index, h in zip(mine, load_states(store, boundary(last), lengths, decoder), strict=True):
            generator = torch.Generator().manual_seed(1_000_003 * seed + index)
            following = sequences[index][1:].to(decoder.device)
            for _ in range(need.label_samples):
                gradient = torch.cat(
                    [
                        _head_gradient(decoder, chunk, generator if need.labels == "model" else labels)
                        for chunk, labels in zip(h.split(HEAD_CHUNK), _split(following, len(h)), strict=True)
                    ]
                )
                check_finite(gradient, "gradient at the head", index)
                gradients.append(gradient)
            progress.advance()
    store.save(_gradient(need, last), store.ranks.joined({"g": gradients}))


def _split(following: Tensor, n: int) -> list[Tensor]:
    """The labels that the text has for each chunk of n tokens; the last token has none."""
    return [following[start : start + HEAD_CHUNK] for start in range(0, n, HEAD_CHUNK)]


def _head_gradient(decoder: Decoder, h: Tensor, labels: Tensor | torch.Generator) -> Tensor:
    """The gradient (t, d) at h, of given labels for the first rows, or of one drawn for each row."""
    with torch.enable_grad():
        h = h.detach().requires_grad_()
        log_p = decoder.tail(h).float().log_softmax(-1)
        if isinstance(labels, torch.Generator):
            chosen = log_p.gather(1, _sample(log_p.detach(), labels))
        else:
            chosen = log_p[: len(labels)].gather(1, labels.to(torch.int64)[:, None])
        return torch.autograd.grad(-chosen.sum(), h)[0]


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
    p: int,
    store: Store,
    progress: Progress,
) -> None:
    """Factors of pass p of every block, from the last to the first, each from its stored states and the gradient behind.

    Every pass starts from the same gradient at the head, which the last one removes.
    """
    lengths, mine, samples = (
        [len(ids) for ids in sequences],
        store.ranks.share(len(sequences)),
        need.label_samples,
    )
    label = "backward through the original model" + (
        f", pass {p + 1} of {need.passes}" if need.passes > 1 else ""
    )
    with stage(progress, label, decoder.n_blocks * len(mine) * samples):
        for b in reversed(range(decoder.n_blocks)):
            if _passed(store, need, p, b):
                _drop_pass(store, need, p - 1, b)
                progress.advance(len(mine) * samples)
                continue
            states = load_states(store, boundary(b), lengths, decoder)
            gradients = load_states(store, _gradient(need, b + 1), lengths, decoder, "g", samples)
            sums = _Sums.of(decoder, need, p, b, store, samples)
            for i, gradient in enumerate(gradients):
                gradients[i] = decoder.backward_block(b, states[i // samples], gradient, sums.add)
                check_finite(gradients[i], f"gradient at block {b}", mine[i // samples])
                progress.advance()
            if b:
                store.save(_gradient(need, b), store.ranks.joined({"g": gradients}))
            store.save(_factors_after(need, p, b), *sums.finish(sequences))
            _drop_pass(store, need, p - 1, b)
            if b + 1 < decoder.n_blocks or p == need.passes - 1:
                store.remove(_gradient(need, b + 1))


@dataclass
class _Sums:
    """Float64 sums of an estimator's terms over this rank's sequences, for the linears of one block, in one pass.

    done: how many passes there were before.  previous: the factors that they left.  samples: how many times each sequence
    is added, one after the other.  source: what the factors are of, and what earlier passes say of their H_out.
    """

    decoder: Decoder
    b: int
    estimator: Estimator
    want_in: bool
    ranks: Ranks = ALONE
    done: int = 0
    previous: dict[str, Tensor] = field(default_factory=dict)
    samples: int = 1
    sums: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Squares] = field(default_factory=dict)
    weights: dict[str, list[Tensor]] = field(default_factory=dict)
    of_linear: dict[str, Estimator] = field(default_factory=dict)
    viewer: Viewer | None = None
    source: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, decoder: Decoder, need: Need, p: int, b: int, store: Store, samples: int = 1) -> _Sums:
        """Those of pass p of block b; every pass but the last needs H_in, if only for the next."""
        piece = _factors_after(need, p - 1, b)
        previous = (
            {key: value.to(decoder.device) for key, value in unpacked(store.load(piece)).items()} if p else {}
        )
        want_in = need.H_in or p < need.passes - 1
        source = {key: store.facts[key] for key in ("model", "version") if key in store.facts}
        source |= {"estimator": need.estimator, **({"labels": need.labels} if need.gradients else {})}
        source |= {"label_samples": need.label_samples} if need.gradients and need.label_samples > 1 else {}
        source |= {"squares_out": store.metadata(piece).get("squares_out", {})} if p else {}
        estimator = get_estimator(need.estimator)
        return cls(decoder, b, estimator, want_in, store.ranks, p, previous, samples, source=source)

    def run(self, h: Tensor) -> Tensor:
        """Run the block on h (T, d), add one sequence's terms for all linears, and return the block's output (T, d)."""
        view = None
        if isinstance(self.estimator, Local):
            self.viewer = self.viewer or Viewer(self.decoder, self.b, self.estimator.sees)
            h, view = self.viewer.run(h)
            inputs = view.inputs
        else:
            h, inputs = self.decoder.run_block_capturing(self.b, h)
        for spec in self.decoder.linears[self.b]:
            self.add(spec.name, inputs[spec.name], None, view)
        return h

    def add(self, name: str, x: Tensor, g: Tensor | None, view: BlockView | None = None) -> None:
        """Add one sequence's terms for one linear, in float32 whatever the model computes in."""
        x, g = x.float(), None if g is None else g.float()
        estimator = self._estimator(name, view)
        owner = self._first(name) if estimator.shares_input else name
        term_in, term_out = estimator.terms(x, g, self.want_in and owner == name)
        for key, term in ((f"{name}.H_in", term_in), (f"{name}.H_out", term_out)):
            if term is None:
                continue
            if key not in self.sums:
                self.sums[key] = torch.zeros_like(term, dtype=torch.float64)
            self.sums[key] += term
        if term_out is not None:
            self.squares.setdefault(name, Squares(self.samples)).add(term_out)
        weights = estimator.token_weights(g)
        if weights is not None:
            self.weights.setdefault(f"{name}.token_weights", []).append(weights)

    def finish(self, sequences: Sequence[Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The means over ``sequences``, those of all ranks, packed, the token weights' over samples, and the metadata.

        Factors without a term in this pass stay as they are. Only the first rank's are whole.
        To be called once: the sums are divided in place.
        """
        totals = self.ranks.total(self.sums)
        squares = self.ranks.total({name: of.whole for name, of in self.squares.items()})
        weights = self.ranks.joined({key: _means(parts, self.samples) for key, parts in self.weights.items()})
        counts = {"n_sequences": len(sequences), "n_tokens": sum(map(len, sequences))}
        count = counts["n_tokens" if self.estimator.per_token else "n_sequences"] * self.samples
        tensors = {k: v for k, v in self.previous.items() if self.want_in or not k.endswith(".H_in")}
        tensors |= {key: total.div_(count) for key, total in totals.items()}
        tensors = {k: pack(v) if k.endswith((".H_in", ".H_out")) else v for k, v in tensors.items()}
        tensors |= weights
        shared = {spec.name: self._first(spec.name) for spec in self.decoder.linears[self.b]}
        shared = {
            name: first
            for name, first in shared.items()
            if f"{name}.H_in" not in tensors and f"{first}.H_in" in tensors
        }
        facts = {"layout": LAYOUT, **counts, **self.source, "shared_H_in": shared}
        facts["data"] = [fingerprint([ids])[:16] for ids in sequences]
        if squares:
            facts["squares_out"] = {name: float(total) / count**2 for name, total in squares.items()}
        return tensors, facts

    def _first(self, name: str) -> str:
        """The first of the linears that share ``name``'s input."""
        return next(group[0] for group in self.decoder.groups[self.b] if name in group)

    def _estimator(self, name: str, view: BlockView | None) -> Estimator:
        """The estimator of this pass for one linear, and for the sequence of ``view``."""
        if view is not None:
            assert isinstance(self.estimator, Local)
            return self.estimator.of(view, name)
        if self.done and name not in self.of_linear:
            assert isinstance(self.estimator, Iterated)
            own = f"{name}.H_in"
            H_in = self.previous[own if own in self.previous else f"{self._first(name)}.H_in"]
            self.of_linear[name] = self.estimator.after(self.done, H_in, self.previous.get(f"{name}.H_out"))
        return self.of_linear.get(name, self.estimator)


def _means(parts: Sequence[Tensor], n: int) -> list[Tensor]:
    """The mean of every n successive parts."""
    return [torch.stack(list(parts[i : i + n])).mean(0) for i in range(0, len(parts), n)]


def load_states(
    store: Store, piece: str, lengths: Sequence[int], decoder: Decoder, key: str = "h", samples: int = 1
) -> list[Tensor]:
    """Of the states that ``piece`` holds those of this rank's sequences, (T, d) each, on the decoder's device.

    lengths: T of all sequences.  samples: how many states there are of each sequence, one after the other.
    """
    mine = store.ranks.share(len(lengths))
    own = [length for length in lengths[mine.start : mine.stop] for _ in range(samples)]
    start = samples * sum(lengths[: mine.start])
    rows = store.rows(piece, key, start, start + sum(own))
    return list(rows.to(decoder.device).split(own)) if own else []
