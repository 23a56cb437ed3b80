"""How far a quantized model is from its original: perplexity, KL divergence and top-1 agreement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bakron.errors import ConfigError, DataError, NonFiniteError, ShapeError

Progress = Callable[[], None]


class DecoderLike(Protocol):
    """What is asked of a model: its states after the last block, and the logits that follow from one."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        ...

    def hidden_states(self, sequences: Sequence[Tensor], advance: Progress) -> list[Tensor]:
        """For each of the ids (T,) → (T, d); advance() is called after each block of each sequence."""
        ...

    def tail(self, h: Tensor) -> Tensor:
        """(t, d) → logits (t, V)."""
        ...


@dataclass(frozen=True)
class Quality:
    """perplexity: exp of the mean negative log-likelihood of the next token.

    kl: mean over tokens of KL(original ‖ model), nats.  kl_p99: its 99th percentile.  top1: share of
    positions at which both rank the same token first.  These three are None without a reference.
    n_tokens: tokens predicted, T − 1 a sequence; all are over the same positions.
    """

    perplexity: float
    kl: float | None
    kl_p99: float | None
    top1: float | None
    n_tokens: int


class Reference:
    """The original model's states after its last block, on the CPU, so that its blocks may change in place.

    It keeps the states (Σ T · d), not the logits (Σ T · V), and the decoder, whose tail must not change.
    """

    def __init__(
        self, decoder: DecoderLike, sequences: Sequence[Tensor], *, progress: Progress = lambda: None
    ) -> None:
        """sequences: ids (T,), T ≥ 2.  progress() after each block of each.  Raises DataError."""
        _check_sequences(sequences)
        self.sequences = [ids.cpu().clone() for ids in sequences]
        self.decoder = decoder
        with torch.no_grad():
            self.hidden = [h.cpu() for h in decoder.hidden_states(self.sequences, progress)]

    def check(self, sequences: Sequence[Tensor]) -> None:
        """Raises ConfigError unless these are the sequences it was made from."""
        same = len(sequences) == len(self.sequences) and all(
            torch.equal(ids.cpu(), own) for ids, own in zip(sequences, self.sequences, strict=True)
        )
        if not same:
            raise ConfigError(
                f"The reference was made from other token ids: expected its {len(self.sequences)} sequences, "
                f"seen {len(sequences)} with other ids or lengths. Make it from the sequences to evaluate."
            )


def evaluate(
    decoder: DecoderLike,
    sequences: Sequence[Tensor],
    reference: Reference | None = None,
    *,
    chunk: int = 256,
    progress: Progress = lambda: None,
) -> Quality:
    """The quality of ``decoder`` on ids (T,), T ≥ 2: all positions but the last predict the token after them.

    Logits exist for ``chunk`` positions at a time, in float32; sums over tokens and vocabulary are float64.
    kl_p99 is the smallest value that at least 99 % of all tokens do not exceed.  progress() is called after
    each block of each sequence, and after its logits.
    Raises DataError, ConfigError (a reference of other sequences), ShapeError (another vocabulary),
    NonFiniteError (logits; it names the sequence and the position).
    """
    return evaluate_each(decoder, sequences, reference, chunk=chunk, progress=progress)[0]


def evaluate_each(
    decoder: DecoderLike,
    sequences: Sequence[Tensor],
    reference: Reference | None = None,
    *,
    chunk: int = 256,
    progress: Progress = lambda: None,
) -> tuple[Quality, list[Quality]]:
    """What ``evaluate`` returns, and the same for each sequence by itself, of which intervals can be made."""
    _check_sequences(sequences)
    if chunk < 1:
        raise ConfigError(f"chunk: expected at least 1 position, seen {chunk}.")
    if reference is not None:
        reference.check(sequences)
    parts: list[_Tokens] = []
    with torch.no_grad():
        states = decoder.hidden_states(sequences, progress)
    for s, (ids, h) in enumerate(zip(sequences, states, strict=True)):
        losses: list[Tensor] = []
        divergences: list[Tensor] = []
        agreements: list[Tensor] = []
        with torch.no_grad():
            for start in range(0, len(ids) - 1, chunk):
                stop = min(start + chunk, len(ids) - 1)
                log_p = _log_probabilities(decoder, h[start:stop], f"sequence {s}", start)
                target = ids[start + 1 : stop + 1].to(log_p.device, torch.int64)
                losses.append(-log_p.gather(1, target[:, None])[:, 0].cpu().double())
                if reference is not None:
                    state, what = reference.hidden[s][start:stop], f"the original model, sequence {s}"
                    original = _log_probabilities(reference.decoder, state, what, start).to(log_p.device)
                    divergences.append(_kl(original, log_p).cpu())
                    agreements.append((original.argmax(1) == log_p.argmax(1)).cpu())
        parts.append((losses, divergences, agreements))
        progress()
    return _quality(parts), [_quality([part]) for part in parts]


_Tokens = tuple[list[Tensor], list[Tensor], list[Tensor]]  # losses, and against a reference KL and agreement


def _quality(parts: Sequence[_Tokens]) -> Quality:
    """Over the tokens of all these sequences."""
    losses, divergences, agreements = ([piece for part in parts for piece in part[i]] for i in range(3))
    loss = torch.cat(losses)
    perplexity = float(loss.mean().exp())
    if not divergences:
        return Quality(perplexity, None, None, None, len(loss))
    kl = torch.cat(divergences)
    top1 = float(torch.cat(agreements).double().mean())
    return Quality(perplexity, float(kl.mean()), _p99(kl), top1, len(loss))


def _check_sequences(sequences: Sequence[Tensor]) -> None:
    if not sequences:
        raise DataError("Evaluation: expected at least one sequence, seen none.")
    for s, ids in enumerate(sequences):
        if ids.ndim != 1 or len(ids) < 2:
            raise DataError(
                f"Evaluation, sequence {s}: expected ids (T,), T of at least 2, seen {tuple(ids.shape)}."
            )


def _log_probabilities(decoder: DecoderLike, h: Tensor, what: str, start: int) -> Tensor:
    """log softmax (t, V) in float32 of the logits after h (t, d). Raises NonFiniteError."""
    logits = decoder.tail(h.to(decoder.device)).float()
    finite = logits.isfinite().all(1)
    if not bool(finite.all()):
        position = start + int((~finite).nonzero()[0])
        raise NonFiniteError(
            f"Evaluation: {what}, position {position}: the logits hold NaN or infinity. "
            "If the model is in float16, use bfloat16 or float32; else a weight of it is damaged."
        )
    return logits.log_softmax(1)


def _kl(original: Tensor, model: Tensor) -> Tensor:
    """KL(original ‖ model) per row, float64 (t,), of log probabilities (t, V). Raises ShapeError."""
    if original.shape != model.shape:
        raise ShapeError(
            f"Evaluation: expected the original's vocabulary of {original.shape[1]}, seen {model.shape[1]}. "
            "Compare a model with the one that it was made from."
        )
    return (original.exp() * (original - model)).sum(1, dtype=torch.float64)


def _p99(values: Tensor) -> float:
    """The smallest of the values (n,) that at least 99 % of them do not exceed."""
    return float(values.kthvalue(-(-99 * len(values) // 100)).values)
