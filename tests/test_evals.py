"""Claims: perplexity, KL, its 99th percentile and top-1 agreement equal float64 without chunks; a model is at
distance zero from itself; the reference outlives changes of blocks; non-finite logits are named."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bakron.errors import ConfigError, DataError, NonFiniteError, ShapeError
from bakron.evals.quality import Quality, Reference, _p99, evaluate, evaluate_each

VOCABULARY, WIDTH = 50, 8


class Toy:
    """An embedding, one "block" and a head that caps its logits; it records the sizes asked of its tail."""

    device = torch.device("cpu")

    def __init__(self, seed: int = 0, vocabulary: int = VOCABULARY) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.block = torch.randn(WIDTH, WIDTH, generator=generator)
        self.head = torch.randn(vocabulary, WIDTH, generator=generator)
        self.asked: list[int] = []

    def hidden(self, ids: Tensor) -> Tensor:
        return (self.embedding[ids] @ self.block).cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]

    def hidden_states(self, sequences: Sequence[Tensor], advance: Callable[[], None]) -> list[Tensor]:
        states = []
        for ids in sequences:
            states.append(self.hidden(ids))
            advance()
        return states

    def tail(self, h: Tensor) -> Tensor:
        self.asked.append(len(h))
        return 10 * torch.tanh(h @ self.head.T / 10)


@pytest.fixture
def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in (37, 2, 90)]


def noisy(toy: Toy) -> Toy:
    toy.block = toy.block + 0.3 * torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3))
    return toy


def oracle(model: Toy, original: Toy, sequences: list[Tensor]) -> Quality:
    losses, kls, agree = [], [], []
    for ids in sequences:
        p, q = (toy.tail(toy.hidden(ids)).double().log_softmax(-1) for toy in (original, model))
        for t in range(len(ids) - 1):
            losses.append(-float(q[t, ids[t + 1]]))
            kls.append(float((p[t].exp() * (p[t] - q[t])).sum()))
            agree.append(int(p[t].argmax()) == int(q[t].argmax()))
    n = len(losses)
    p99 = sorted(kls)[math.ceil(0.99 * n - 1e-9) - 1]
    return Quality(math.exp(sum(losses) / n), sum(kls) / n, p99, sum(agree) / n, n)


@pytest.mark.parametrize("chunk", [1, 7, 36, 256])
def test_equals_the_float64_oracle_for_every_chunk(sequences: list[Tensor], chunk: int) -> None:
    original, model = Toy(), noisy(Toy())
    expected = oracle(model, original, sequences)
    model.asked.clear()
    quality = evaluate(model, sequences, Reference(original, sequences), chunk=chunk)
    assert max(model.asked) == min(chunk, 89) and sum(model.asked) == 36 + 1 + 89
    assert quality.n_tokens == expected.n_tokens == 126
    assert quality.top1 == expected.top1 not in (0, 1)
    for field in ("perplexity", "kl", "kl_p99"):
        assert getattr(quality, field) == pytest.approx(getattr(expected, field), rel=2e-5)


def test_each_sequence_has_the_quality_that_it_has_alone(sequences: list[Tensor]) -> None:
    original, model = Toy(), noisy(Toy())
    together, each = evaluate_each(model, sequences, Reference(original, sequences), chunk=7)
    assert together == evaluate(model, sequences, Reference(original, sequences), chunk=7)
    assert each == [evaluate(model, [ids], Reference(original, [ids]), chunk=7) for ids in sequences]
    assert evaluate_each(model, sequences)[1][0].kl is None


def test_a_model_is_at_distance_zero_from_itself(sequences: list[Tensor]) -> None:
    quality = evaluate(Toy(), sequences, Reference(Toy(), sequences))
    assert (quality.kl, quality.kl_p99, quality.top1) == (0.0, 0.0, 1.0)


def test_without_a_reference_only_perplexity(sequences: list[Tensor]) -> None:
    model = noisy(Toy())
    full = evaluate(model, sequences, Reference(Toy(), sequences))
    assert evaluate(model, sequences) == replace(full, kl=None, kl_p99=None, top1=None)


def test_a_uniform_model_has_the_vocabulary_as_perplexity(sequences: list[Tensor]) -> None:
    uniform = Toy()
    uniform.head = torch.zeros_like(uniform.head)
    assert evaluate(uniform, sequences).perplexity == pytest.approx(VOCABULARY, rel=1e-6)


def test_kl_is_from_the_original_to_the_model(sequences: list[Tensor]) -> None:
    sharp, flat = Toy(), Toy()
    flat.head = flat.head / 10
    there = evaluate(flat, sequences, Reference(sharp, sequences)).kl
    back = evaluate(sharp, sequences, Reference(flat, sequences)).kl
    assert there == pytest.approx(oracle(flat, sharp, sequences).kl, rel=1e-4)
    assert there != pytest.approx(back, rel=0.05)


def test_the_reference_outlives_a_change_of_the_blocks_in_place(sequences: list[Tensor]) -> None:
    toy = Toy()
    reference = Reference(toy, sequences)
    noisy(toy)
    assert (
        evaluate(toy, sequences, reference).kl
        == evaluate(noisy(Toy()), sequences, Reference(Toy(), sequences)).kl
    )


@pytest.mark.parametrize(("n", "expected"), [(1, 0), (2, 1), (99, 98), (100, 98), (101, 99), (1000, 989)])
def test_p99_is_exact(n: int, expected: int) -> None:
    values = torch.randperm(n, generator=torch.Generator().manual_seed(n)).double()
    assert _p99(values) == expected
    assert int((values <= expected).sum()) >= 0.99 * n > int((values < expected).sum())


def test_sums_over_tokens_are_in_float64() -> None:
    """In float32 a mean of 40,001 equal losses drifts away from the one loss."""
    uniform = Toy()
    uniform.head = torch.zeros_like(uniform.head)
    one, many = (torch.zeros(n + 1, dtype=torch.int64) for n in (1, 40_001))
    expected = evaluate(uniform, [one]).perplexity
    assert evaluate(uniform, [many]).perplexity == pytest.approx(expected, rel=1e-12)


def test_non_finite_logits_are_named(sequences: list[Tensor]) -> None:
    class Broken(Toy):
        bad = float("nan")

        def hidden(self, ids: Tensor) -> Tensor:
            h = super().hidden(ids)
            h[min(20, len(h) - 1) :] *= self.bad
            return h

    with pytest.raises(NonFiniteError, match=r"sequence 0, position 20: the logits hold NaN"):
        evaluate(Broken(), sequences, chunk=16)
    with pytest.raises(NonFiniteError, match=r"the original model, sequence 0, position 20"):
        evaluate(Toy(), sequences, Reference(Broken(), sequences), chunk=16)


def test_a_reference_of_other_sequences_is_refused(sequences: list[Tensor]) -> None:
    reference = Reference(Toy(), sequences)
    for other in (sequences[:2], sequences[::-1], [ids + (ids == 3) for ids in sequences]):
        with pytest.raises(ConfigError, match="made from other token ids"):
            evaluate(Toy(), other, reference)


def test_another_vocabulary_is_refused(sequences: list[Tensor]) -> None:
    with pytest.raises(ShapeError, match="vocabulary of 60, seen 50"):
        evaluate(Toy(), sequences, Reference(Toy(vocabulary=60), sequences))


@pytest.mark.parametrize("bad", [[], [torch.tensor([1])], [torch.tensor([[1, 2]])]])
def test_nothing_to_predict_is_refused(bad: list[Tensor]) -> None:
    with pytest.raises(DataError, match="expected"):
        evaluate(Toy(), bad)
    with pytest.raises(DataError, match="expected"):
        Reference(Toy(), bad)


def test_chunk_must_be_positive(sequences: list[Tensor]) -> None:
    with pytest.raises(ConfigError, match="chunk"):
        evaluate(Toy(), sequences, chunk=0)


def test_progress_counts_blocks_and_logits_of_each_sequence(sequences: list[Tensor]) -> None:
    calls: list[None] = []

    def progress() -> None:
        calls.append(None)

    reference = Reference(Toy(), sequences, progress=progress)
    assert len(calls) == 3
    evaluate(Toy(), sequences, reference, progress=progress)
    assert len(calls) == 3 + 2 * 3


def test_nothing_requires_grad(sequences: list[Tensor]) -> None:
    toy = Toy()
    toy.head.requires_grad_()
    toy.embedding.requires_grad_()
    reference = Reference(toy, sequences)
    assert not any(h.requires_grad for h in reference.hidden)
    evaluate(toy, sequences, reference)
