"""After the solve: all scales tuned together, so that the whole model's predictions come back to the original's.

The codes stay. A step takes one calibration sequence and the gradient of KL(original ‖ quantized), mean over its tokens, in
every scale: one forward, which keeps the states between blocks, and a backward that runs each block again from them. The
scales follow it by Adam (arXiv 1412.6980) with relative steps. The weights are always those that a loader would make of the
scales as they are stored, so that nothing is left to round in the end. The first rank does it all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from bakron.core.layers import SolvedLayer
from bakron.models import Decoder
from bakron.run.collect import HEAD_CHUNK, boundary, check_finite
from bakron.run.progress import Progress, stage
from bakron.run.store import Store

RATE = 2e-3  # of a scale, the largest change in a step
WARM_UP = 8  # steps over which the rate rises; afterwards it falls to 0 as a cosine
DECAYS = (0.9, 0.99)  # of the means of gradients and of their squares
JUDGED = 8  # sequences whose divergence is measured before and after
SAVES = 16  # times that unfinished work is kept
KEPT = ("change", "mean", "square")


def tuned(passes: int, b: int) -> str:
    """The piece that holds the scales of block b after so many passes; its metadata has the divergence before and after."""
    return f"tuned/{passes}/{b:04d}"


def _unfinished(passes: int) -> str:
    return f"tuned/{passes}/unfinished"


@dataclass
class _Scale:
    """The scales (d_out, n_groups) of one linear while they are tuned: those of ``layer`` times 1 + ``change``.

    mean, square: those of the gradients in ``change``.  gradient: of this step; None if no token came to the linear.
    """

    layer: SolvedLayer
    change: Tensor
    mean: Tensor
    square: Tensor
    gradient: Tensor | None = None

    @classmethod
    def of(cls, layer: SolvedLayer, device: torch.device) -> _Scale:
        tensors = {key: getattr(layer, key).to(device) for key in ("codes", "scale", "zero")}
        zeros = [torch.zeros(layer.scale.shape, device=device) for _ in range(3)]
        return cls(dataclasses.replace(layer, **tensors), *zeros)

    def see(self, x: Tensor, g: Tensor) -> None:
        """Add what inputs x (t, d_in) and gradients g (t, d_out) of the linear say."""
        layer, n = self.layer, self.layer.spec.d_in
        size = n if layer.scheme.group_size == -1 else layer.scheme.group_size
        term = (g.float().T @ x.float()) * (layer.codes - layer.zero.repeat_interleave(size, 1)[:, :n])
        term = pad(term, (0, -n % size)).view(len(term), -1, size).sum(2) * layer.scale
        self.gradient = term if self.gradient is None else self.gradient + term

    def step(self, rate: float, t: int) -> None:
        """Step t, from 1, of Adam; without a gradient nothing moves."""
        if self.gradient is not None:
            self.mean.lerp_(self.gradient, 1 - DECAYS[0])
            self.square.lerp_(self.gradient.square(), 1 - DECAYS[1])
            mean, square = self.mean / (1 - DECAYS[0] ** t), self.square / (1 - DECAYS[1] ** t)
            self.change -= rate * mean / (square.sqrt() + torch.finfo(square.dtype).tiny)
            self.gradient = None

    @property
    def now(self) -> SolvedLayer:
        """The layer with its scales as they will be stored; one that cannot be, or would change its sign, is the first."""
        first = self.layer.scale
        kept = (first * (1 + self.change)).to(first.dtype)
        usable = torch.isfinite(kept) & (kept.sign() == first.sign())
        return dataclasses.replace(self.layer, scale=torch.where(usable, kept, first))


def tune(
    decoder: Decoder,
    sequences: Sequence[Tensor],
    passes: int,
    layers: Callable[[int], dict[str, SolvedLayer]],
    collected: Store,
    store: Store,
    progress: Progress,
) -> None:
    """Leave in ``store`` the tuned scales of all blocks, and the decoder, whose weights are the solved ones, somewhere between.

    passes: over the sequences, in an order of its own each.  layers: the solved ones of a block, by name.  collected: has
    the original model's states.  Scales that bring no lower divergence on some of the sequences are thrown away.
    Raises NonFiniteError naming the sequence.
    """
    scales = {
        name: _Scale.of(layer, decoder.device)
        for b in range(decoder.n_blocks)
        for name, layer in layers(b).items()
    }
    wanted = _Wanted(decoder, sequences, collected)
    steps, unfinished = passes * len(sequences), _unfinished(passes)
    every = max(1, steps // SAVES)
    done, before = 0, 0.0
    if store.has(unfinished):
        tensors, facts = store.load(unfinished), store.metadata(unfinished)
        done, before = facts["steps"], facts["kl"]
        for name, scale in scales.items():
            for key in KEPT:
                getattr(scale, key).copy_(tensors[f"{name}.{key}"])
        _put(decoder, scales)
    with stage(progress, "tune scales", steps):
        progress.advance(done)
        if not done:
            before = wanted.divergence()
        for t in range(done, steps):
            order = torch.randperm(
                len(sequences), generator=torch.Generator().manual_seed(t // len(sequences))
            )
            wanted.backward(int(order[t % len(sequences)]), scales)
            rate = RATE * min(1, (t + 1) / WARM_UP) * (1 + math.cos(math.pi * t / steps)) / 2
            for scale in scales.values():
                scale.step(rate, t + 1)
            _put(decoder, scales)
            progress.advance()
            if (t + 1) % every == 0:
                tensors = {f"{name}.{key}": getattr(s, key) for name, s in scales.items() for key in KEPT}
                store.save(unfinished, tensors, {"steps": t + 1, "kl": before})
    after = wanted.divergence()
    if not after < before:
        progress.note(
            f"Tuned scales left KL on {min(JUDGED, len(sequences))} calibration sequences at {after:.4f}, where it was "
            f"{before:.4f}: they are thrown away. Use more or longer sequences, or tune 0."
        )
    for b in range(decoder.n_blocks):
        chosen = {name: scales[name].now if after < before else layer for name, layer in layers(b).items()}
        facts = {"kl": [before, after]}
        store.save(tuned(passes, b), {f"{name}.scale": layer.scale for name, layer in chosen.items()}, facts)
    store.remove(unfinished)


def _put(decoder: Decoder, scales: dict[str, _Scale]) -> None:
    for name, scale in scales.items():
        decoder.set_weight(name, scale.now.weight(decoder.dtype))


@dataclass
class _Wanted:
    """The original model's predictions on the calibration sequences, and how far the decoder's are from them."""

    decoder: Decoder
    sequences: Sequence[Tensor]
    collected: Store

    def original(self, s: int) -> Tensor:
        """The original's states (T, d) after the last block."""
        start = sum(len(ids) for ids in self.sequences[:s])
        rows = self.collected.rows(
            boundary(self.decoder.n_blocks), "h", start, start + len(self.sequences[s])
        )
        return rows.to(self.decoder.device)

    def states(self, s: int) -> list[Tensor]:
        """The decoder's states (T, d) that enter each block, and that which leaves the last one."""
        states = [self.decoder.embed(self.sequences[s].to(self.decoder.device))]
        for b in range(self.decoder.n_blocks):
            with torch.no_grad():
                states.append(self.decoder.run_block(b, states[-1]))
        check_finite(states[-1], "the quantized model", s)
        return states

    def at_head(self, s: int, h: Tensor) -> tuple[float, Tensor]:
        """The mean KL(original ‖ decoder) of the states h (T, d), and its gradient at h."""
        total, gradients = 0.0, []
        for theirs, ours in zip(self.original(s).split(HEAD_CHUNK), h.split(HEAD_CHUNK), strict=True):
            with torch.no_grad():
                p = self.decoder.tail(theirs).float().log_softmax(-1)
            with torch.enable_grad():
                ours = ours.detach().requires_grad_()
                q = self.decoder.tail(ours).float().log_softmax(-1)
                kl = (p.exp() * (p - q)).sum() / len(h)
                gradients.append(torch.autograd.grad(kl, ours)[0])
            total += float(kl.detach())
        return total, torch.cat(gradients)

    def divergence(self) -> float:
        """The mean over some sequences."""
        chosen = range(min(JUDGED, len(self.sequences)))
        return sum(self.at_head(s, self.states(s)[-1])[0] for s in chosen) / len(chosen)

    def backward(self, s: int, scales: dict[str, _Scale]) -> None:
        """Let ``scales`` see the gradients of sequence s."""

        def see(name: str, x: Tensor, g: Tensor) -> None:
            if name in scales:
                scales[name].see(x, g)

        states = self.states(s)
        gradient = self.at_head(s, states.pop())[1]
        for b in reversed(range(self.decoder.n_blocks)):
            gradient = self.decoder.backward_block(b, states.pop(), gradient, see)
            check_finite(gradient, f"gradient at block {b} of the quantized model", s)
