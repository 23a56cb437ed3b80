"""Claims about Hessian factors: ``collect`` stores what the formulas say, and the formulas are the Fisher matrix's.

1. gram, kfac and shampoo factors and token weights equal explicit sums over sequences and tokens, taken by plain
   autograd over the entire transformers model with the same labels; token and sequence equal their iteration on those.
2. Labels are drawn from the model's own distribution, or are the text's next tokens; head chunks do not matter. Several
   labels for each token are further independent draws, over which factors and token weights are means.
3. kfac and shampoo equal the dense Fisher matrix where a Kronecker product can; shampoo's are always its partial traces;
   token and sequence approach the Kronecker product that is nearest to it.

Kinds: oracle, statistical with fixed seeds, behaviour.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from autograd_oracle import Observed, assert_near, load_whole, logits, observe, sampled_labels
from tiny_models import FAMILIES, TINY_VOCAB, tiny_decoder
from torch import Tensor

from bakron.data import fingerprint
from bakron.errors import ConfigError, NonFiniteError
from bakron.estimators import Iterated, estimator_names, get_estimator, uses_gradients
from bakron.models import Decoder, load_decoder
from bakron.run import collect as collecting
from bakron.run.collect import Need, boundary, collect, factors
from bakron.run.factors import unpacked
from bakron.run.progress import Silent
from bakron.run.store import Store

SEED = 3
LENGTHS = (17, 9, 23)


class Case(NamedTuple):
    """A tiny model, sequences of different lengths, and what the oracle saw: a dict of linears for each sequence."""

    decoder: Decoder
    whole: Any
    sequences: list[Tensor]
    seen: list[dict[str, Observed]]

    @property
    def names(self) -> list[str]:
        return [spec.name for block in self.decoder.linears for spec in block]


def make_ids(length: int, seed: int) -> Tensor:
    return torch.randint(2, TINY_VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def make_case(family: str, path: Path) -> Case:
    tiny_decoder(family, path)
    decoder, whole = load_decoder(path), load_whole(path)
    names = [spec.name for block in decoder.linears for spec in block]
    sequences = [make_ids(length, 10 + i) for i, length in enumerate(LENGTHS)]
    seen = [
        observe(whole, ids, names, sampled_labels(whole, ids, SEED, index))
        for index, ids in enumerate(sequences)
    ]
    return Case(decoder, whole, sequences, seen)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case("llama", tmp_path_factory.mktemp("llama"))


def collected(
    case: Case,
    store: Path,
    name: str,
    *,
    H_in: bool = True,
    sequences: list[Tensor] | None = None,
    labels: str = "model",
    label_samples: int = 1,
) -> dict[str, Tensor]:
    """All factors that ``collect`` stores, of all blocks."""
    gradients = uses_gradients(get_estimator(name))
    need = Need(name, True, H_in, gradients, labels, label_samples)
    opened = Store(store, {})
    collect(case.decoder, sequences or case.sequences, need, opened, SEED, Silent())
    result: dict[str, Tensor] = {}
    for b in range(case.decoder.n_blocks):
        result |= unpacked(opened.load(factors(need, b)))
    return result


# 1. Explicit sums


def test_shampoo_is_the_mean_of_sequence_gradients(case: Case, tmp_path: Path) -> None:
    stored = collected(case, tmp_path, "shampoo")
    for name in case.names:
        G = [seen[name].G for seen in case.seen]
        assert_near(stored[f"{name}.H_in"], sum(g.T @ g for g in G) / len(G))
        assert_near(stored[f"{name}.H_out"], sum(g @ g.T for g in G) / len(G))
        weights = torch.cat([(seen[name].g ** 2).sum(1) for seen in case.seen])
        assert_near(stored[f"{name}.token_weights"], weights)
    assert len(stored) == 3 * len(case.names)


def test_kfac_is_the_mean_over_tokens(case: Case, tmp_path: Path) -> None:
    stored = collected(case, tmp_path, "kfac")
    first = first_of_group(case.decoder)
    for name in case.names:
        g = torch.cat([seen[name].g for seen in case.seen])
        x = torch.cat([seen[name].x for seen in case.seen])
        assert_near(stored[f"{name}.H_out"], g.T @ g / len(g))
        assert_near(stored[f"{first[name]}.H_in"], x.T @ x / len(x))
    assert not any("token_weights" in key for key in stored)


def test_gram_is_the_mean_of_inputs_and_layers_with_one_input_share_it(case: Case, tmp_path: Path) -> None:
    stored = collected(case, tmp_path, "gram")
    first = first_of_group(case.decoder)
    for name in case.names:
        x = torch.cat([seen[name].x for seen in case.seen])
        assert_near(stored[f"{first[name]}.H_in"], x.T @ x / len(x))
    assert set(stored) == {f"{name}.H_in" for name in first.values()}


def over_square(H: Tensor) -> Tensor:
    return H / (H**2).sum()


def test_token_is_its_iteration_on_the_gradients_of_all_tokens(case: Case, tmp_path: Path) -> None:
    stored = collected(case, tmp_path, "token")
    for name in case.names:
        g = torch.cat([seen[name].g for seen in case.seen])
        x = torch.cat([seen[name].x for seen in case.seen])
        n = len(x)
        H_in = sum(torch.outer(a, a) for a in x) / n
        H_out = sum(a.dot(over_square(H_in) @ a) * torch.outer(b, b) for a, b in zip(x, g, strict=True)) / n
        weights = torch.stack([b.dot(over_square(H_out) @ b) for b in g])
        assert_near(stored[f"{name}.H_out"], H_out)
        assert_near(stored[f"{name}.token_weights"], weights)
        assert_near(
            stored[f"{name}.H_in"], sum(w * torch.outer(a, a) for a, w in zip(x, weights, strict=True)) / n
        )
    assert len(stored) == 3 * len(case.names)


def test_sequence_is_its_iteration_on_the_gradients_of_whole_sequences(case: Case, tmp_path: Path) -> None:
    stored = collected(case, tmp_path, "sequence")
    for name in case.names:
        G = [seen[name].G for seen in case.seen]
        H_in = sum(s.T @ s for s in G) / len(G) / len(G[0])
        H_out = sum(s @ over_square(H_in) @ s.T for s in G) / len(G)
        assert_near(stored[f"{name}.H_out"], H_out)
        assert_near(stored[f"{name}.H_in"], sum(s.T @ over_square(H_out) @ s for s in G) / len(G))
        weights = torch.cat(
            [((seen[name].g @ over_square(H_out)) * seen[name].g).sum(1) for seen in case.seen]
        )
        assert_near(stored[f"{name}.token_weights"], weights)
    assert len(stored) == 3 * len(case.names)


@pytest.mark.parametrize("estimator", ["shampoo", "kfac", "token"])
@pytest.mark.parametrize("label_samples", [1, 2])
def test_the_squares_of_H_out_are_those_of_the_terms_of_sequences(
    llama: Case, tmp_path: Path, estimator: str, label_samples: int
) -> None:
    stored = collected(llama, tmp_path, estimator, label_samples=label_samples)
    need = Need(estimator, True, True, True, label_samples=label_samples)
    whole, names = llama.whole, llama.names
    samples = [
        [observe(whole, ids, names, sampled_labels(whole, ids, SEED, i, k)) for k in range(label_samples)]
        for i, ids in enumerate(llama.sequences)
    ]
    for b, specs in enumerate(llama.decoder.linears):
        squares = Store(tmp_path, {}).metadata(factors(need, b))["squares_out"]
        assert set(squares) == {spec.name for spec in specs}
        for name in squares:
            x = torch.cat([of[0][name].x for of in samples])
            metric = over_square(x.T @ x / len(x))
            terms = [
                sum(H_out_term(estimator, seen[name], metric) for seen in of) / label_samples
                for of in samples
            ]
            count = len(terms) if estimator == "shampoo" else sum(LENGTHS)
            assert_near(stored[f"{name}.H_out"], sum(terms) / count)
            assert squares[name] == pytest.approx(
                sum(float((h**2).sum()) for h in terms) / count**2, rel=1e-3
            )


def H_out_term(estimator: str, seen: Observed, metric: Tensor) -> Tensor:
    if estimator == "shampoo":
        return seen.G @ seen.G.T
    weights = ((seen.x @ metric) * seen.x).sum(1) if estimator == "token" else torch.ones(len(seen.x))
    return (seen.g * weights[:, None]).T @ seen.g


def first_of_group(decoder: Decoder) -> dict[str, str]:
    """Linear → the first linear of the block that reads the very same tensor."""
    return {name: group[0] for block in decoder.groups for group in block for name in group}


def test_query_key_value_and_gate_up_share_an_input(llama: Case) -> None:
    parts = {tuple(name.rpartition(".")[2] for name in group) for group in llama.decoder.groups[0]}
    assert parts == {("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)}


def test_boundaries_are_the_states_of_the_whole_model(llama: Case, tmp_path: Path) -> None:
    collected(llama, tmp_path, "gram")
    with torch.no_grad():
        outputs = [llama.decoder.model(ids[None], output_hidden_states=True) for ids in llama.sequences]
    for b in range(llama.decoder.n_blocks):
        own = torch.cat([output.hidden_states[b][0] for output in outputs])
        assert torch.equal(Store(tmp_path, {}).load(boundary(b))["h"], own)


@pytest.mark.parametrize("name", ["shampoo", "token", "sequence"])
def test_without_H_in_the_rest_is_the_same(llama: Case, tmp_path: Path, name: str) -> None:
    with_it = collected(llama, tmp_path / "with", name)
    without = collected(llama, tmp_path / "without", name, H_in=False)
    assert set(without) == {key for key in with_it if not key.endswith(".H_in")}
    assert all(torch.equal(value, with_it[key]) for key, value in without.items())


def test_counts_and_origin_are_stored(llama: Case, tmp_path: Path) -> None:
    collected(llama, tmp_path, "kfac")
    need = Need("kfac", boundaries=True, H_in=True, gradients=True)
    metadata = Store(tmp_path, {}).metadata(factors(need, 1))
    assert metadata["n_sequences"] == 3 and metadata["n_tokens"] == sum(LENGTHS)
    assert (metadata["estimator"], metadata["labels"], metadata["layout"]) == ("kfac", "model", 1)
    assert metadata["data"] == [fingerprint([ids])[:16] for ids in llama.sequences]
    first = first_of_group(llama.decoder)
    block = [name for group in llama.decoder.groups[1] for name in group]
    assert metadata["shared_H_in"] == {name: first[name] for name in block if first[name] != name}


@pytest.mark.parametrize("name", ["shampoo", "token", "sequence"])
def test_gradients_and_earlier_passes_are_dropped_when_their_factors_are_stored(
    llama: Case, tmp_path: Path, name: str
) -> None:
    collected(llama, tmp_path, name)
    assert not [
        path for part in ("gradients", "passes") for path in tmp_path.rglob(f"{part}/**/*.safetensors")
    ]


def test_collecting_twice_gives_equal_bits_and_another_seed_other_labels(llama: Case, tmp_path: Path) -> None:
    one, two = (collected(llama, tmp_path / name, "shampoo") for name in ("one", "two"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    need = Need("shampoo", True, True, True)
    other = Store(tmp_path / "other", {})
    collect(llama.decoder, llama.sequences, need, other, SEED + 1, Silent())
    assert all(
        not torch.equal(value, one[key])
        for b in (0, 1)
        for key, value in other.load(factors(need, b)).items()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_have_float32_precision_whatever_the_dtype_of_the_model(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    decoder = load_decoder(tiny_decoder("llama", tmp_path / "model"), dtype=dtype)
    case = Case(decoder, None, [make_ids(60, 0)], [])
    stored = {name: collected(case, tmp_path / name, name) for name in ("gram", "shampoo")}
    h = Store(tmp_path / "gram", {}).load(boundary(1))["h"]
    name = "model.layers.1.mlp.down_proj"
    x = decoder.run_block_capturing(1, h)[1][name].double()
    assert_near(stored["gram"][f"{name}.H_in"], x.T @ x / len(x), 1e-5)
    for key, value in stored["shampoo"].items():
        assert value.dtype == torch.float32
        assert bool((value.to(dtype).float() != value).any()), f"{key} has the precision of {dtype}"


def test_infinite_activations_are_named(tmp_path: Path) -> None:
    decoder = load_decoder(tiny_decoder("llama", tmp_path / "model"))
    with torch.no_grad():
        decoder.model.get_submodule("model.layers.1.mlp.down_proj").weight.fill_(3e38)
    sequences = [make_ids(9, 0), make_ids(9, 1)]
    with pytest.raises(NonFiniteError, match=r"block 1, calibration sequence 0"):
        collect(
            decoder, sequences, Need("gram", True, True, False), Store(tmp_path / "work", {}), 0, Silent()
        )


# 2. Labels


def test_labels_follow_the_distribution_and_never_have_probability_zero() -> None:
    p = torch.tensor([0.0, 0.5, 0.05, 0.0, 0.25, 0.2, 0.0])
    n = 40_000
    labels = collecting._sample(p.log().expand(n, -1), torch.Generator().manual_seed(0))
    assert labels.shape == (n, 1)
    seen = torch.bincount(labels[:, 0], minlength=len(p)) / n
    assert (seen[p == 0] == 0).all()
    assert ((seen - p).abs() <= 4.5 * (p * (1 - p) / n).sqrt()).all()


def test_a_certain_prediction_is_always_drawn() -> None:
    for label in (0, 3, 6):
        log_p = torch.full((200, 7), -torch.inf)
        log_p[:, label] = 0.0
        assert (collecting._sample(log_p, torch.Generator().manual_seed(1)) == label).all()


def test_chunks_of_the_head_do_not_matter(
    llama: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = collected(llama, tmp_path / "whole", "shampoo")
    monkeypatch.setattr(collecting, "HEAD_CHUNK", 5)
    chunks = collected(llama, tmp_path / "chunks", "shampoo")
    for key, value in whole.items():
        assert_near(chunks[key], value, 1e-5)


def test_labels_of_the_text_are_its_next_tokens(
    llama: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "HEAD_CHUNK", 8)  # 17 = 8 + 8 + 1: the last chunk has no label
    stored = collected(llama, tmp_path, "shampoo", labels="data")
    none = torch.tensor([-100])
    seen = [observe(llama.whole, ids, llama.names, torch.cat([ids[1:], none])) for ids in llama.sequences]
    for name in llama.names:
        assert_near(stored[f"{name}.H_out"], sum(s[name].G @ s[name].G.T for s in seen) / len(seen))
    drawn = collected(llama, tmp_path, "shampoo")  # in the same store
    assert all(not torch.equal(value, drawn[key]) for key, value in stored.items())


def test_several_labels_are_successive_draws_and_factors_their_means(llama: Case, tmp_path: Path) -> None:
    whole, names = llama.whole, llama.names
    stored = {name: collected(llama, tmp_path, name, label_samples=3) for name in ("shampoo", "kfac")}
    samples = [
        [observe(whole, ids, names, sampled_labels(whole, ids, SEED, index, k)) for k in range(3)]
        for index, ids in enumerate(llama.sequences)
    ]
    first = first_of_group(llama.decoder)
    for name in names:
        G = [seen[name].G for of in samples for seen in of]
        assert_near(stored["shampoo"][f"{name}.H_in"], sum(g.T @ g for g in G) / len(G))
        assert_near(stored["shampoo"][f"{name}.H_out"], sum(g @ g.T for g in G) / len(G))
        g = torch.cat([seen[name].g for of in samples for seen in of])
        x = torch.cat([of[0][name].x for of in samples])
        assert_near(stored["kfac"][f"{name}.H_out"], g.T @ g / len(g))
        assert_near(stored["kfac"][f"{first[name]}.H_in"], x.T @ x / len(x))
        weights = [torch.stack([(seen[name].g ** 2).sum(1) for seen in of]).mean(0) for of in samples]
        assert_near(stored["shampoo"][f"{name}.token_weights"], torch.cat(weights))
    need = Need("shampoo", True, True, True, label_samples=3)
    metadata = Store(tmp_path, {}).metadata(factors(need, 1))
    assert (metadata["label_samples"], metadata["n_sequences"], metadata["n_tokens"]) == (3, 3, sum(LENGTHS))


def test_a_pass_without_gradients_has_no_samples(llama: Case, tmp_path: Path) -> None:
    """The first pass of ``token`` sees each input once, so that H_in of three samples begins as that of one does."""
    stored = collected(llama, tmp_path, "token", label_samples=2)
    for name in llama.names:
        x = torch.cat([seen[name].x for seen in llama.seen])
        other = [
            observe(llama.whole, ids, [name], sampled_labels(llama.whole, ids, SEED, index, 1))[name].g
            for index, ids in enumerate(llama.sequences)
        ]
        H_in = x.T @ x / len(x)
        weights = ((x @ over_square(H_in)) * x).sum(1)
        H_out = sum(
            (g * weights[:, None]).T @ g / len(x) / 2
            for g in (torch.cat([seen[name].g for seen in llama.seen]), torch.cat(other))
        )
        assert_near(stored[f"{name}.H_out"], H_out)


# 3. The Fisher matrix


class Toy:
    """Tokens mixed after one linear: logits = M·tanh(X Wᵀ)·Aᵀ; few enough labels to enumerate all of them."""

    def __init__(self, tokens: int, *, d_in: int = 3, d_out: int = 2, vocab: int = 3) -> None:
        generator = torch.Generator().manual_seed(tokens)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.X, self.W, self.A = draw(tokens, d_in), draw(d_out, d_in), draw(vocab, d_out)
        self.M = draw(tokens, tokens).tril()

    def log_p(self, W: Tensor) -> Tensor:
        return self.head(self.X @ W.T)

    def head(self, y: Tensor) -> Tensor:
        return (self.M @ y.tanh() @ self.A.T).log_softmax(-1)

    def fisher(self) -> Tensor:
        """Σ_t J_tᵀ (diag p_t − p_t p_tᵀ) J_t with J the Jacobian in vec(W), rows first."""
        J = torch.autograd.functional.jacobian(self.log_p, self.W).flatten(2)
        p = self.log_p(self.W).exp()
        middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        return (J.transpose(1, 2) @ middle @ J).sum(0)

    def expected(self, estimator: str) -> tuple[Tensor, Tensor]:
        """The expectation of an estimator's terms over all labels."""
        tokens, vocab = self.M.shape[0], self.A.shape[0]
        H_in, H_out = 0.0, 0.0
        for labels in itertools.product(range(vocab), repeat=tokens):
            y = (self.X @ self.W.T).requires_grad_()
            log_p = self.head(y)[range(tokens), labels].sum()
            g = torch.autograd.grad(-log_p, y)[0]
            term_in, term_out = get_estimator(estimator).terms(self.X, g, True)
            assert term_in is not None and term_out is not None
            probability = log_p.detach().exp()
            H_in, H_out = H_in + probability * term_in, H_out + probability * term_out
        assert isinstance(H_in, Tensor) and isinstance(H_out, Tensor)
        return H_in, H_out


@pytest.mark.parametrize("estimator", ["kfac", "shampoo"])
def test_one_token_gives_the_dense_fisher(estimator: str) -> None:
    toy = Toy(1)
    H_in, H_out = toy.expected(estimator)
    # shampoo's product counts the trace twice
    scale = 1.0 if estimator == "kfac" else float(H_in.trace())
    torch.testing.assert_close(torch.kron(H_out, H_in) / scale, toy.fisher())


def test_kfac_is_exact_for_tokens_that_do_not_interact_and_have_one_input() -> None:
    toy = Toy(3)
    toy.X = toy.X[:1].expand(3, -1)
    toy.M = torch.eye(3, dtype=torch.float64)
    H_in, H_out = toy.expected("kfac")
    torch.testing.assert_close(torch.kron(H_out, H_in / 3), toy.fisher())


def test_shampoo_is_the_partial_traces_of_the_dense_fisher() -> None:
    toy = Toy(3)
    m, n = toy.W.shape
    F = toy.fisher().view(m, n, m, n)
    H_in, H_out = toy.expected("shampoo")
    torch.testing.assert_close(H_in, torch.einsum("ijik->jk", F))
    torch.testing.assert_close(H_out, torch.einsum("ijkj->ik", F))


def iterated(terms: list[tuple[Tensor, Tensor]], name: str, passes: int) -> tuple[Tensor, Tensor]:
    """The factors after so many passes over samples (x, g)."""
    estimator = get_estimator(name)
    assert isinstance(estimator, Iterated)
    H: list[Tensor | None] = [None, None]
    for done in range(passes):
        assert not done or H[0] is not None
        now = estimator if not done else estimator.after(done, H[0], H[1])  # pyright: ignore[reportArgumentType]
        each = [now.terms(x, g, True) for x, g in terms]
        for side in (0, 1):
            if each[0][side] is not None:
                H[side] = sum(term[side] for term in each) / len(each)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert H[0] is not None and H[1] is not None
    return H[0], H[1]


@pytest.mark.parametrize("name", ["token", "sequence"])
def test_iterated_factors_are_the_kronecker_product_nearest_to_the_fisher(name: str) -> None:
    """Scale included; by the dense singular value decomposition of the rearranged Fisher matrix."""
    generator = torch.Generator().manual_seed(0)
    length = 1 if name == "token" else 4
    samples = []
    for _ in range(12):
        x = torch.randn(length, 4, generator=generator, dtype=torch.float64)
        samples.append((x, torch.randn(length, 3, generator=generator, dtype=torch.float64) * x[:, :1]))
    G = [g.T @ x for x, g in samples]
    F = torch.stack([torch.outer(s.flatten(), s.flatten()) for s in G]).mean(0)
    rearranged = F.view(3, 4, 3, 4).transpose(1, 2).reshape(9, 16)
    U, s, Vh = torch.linalg.svd(rearranged)
    nearest = torch.kron(U[:, 0].view(3, 3), Vh[0].view(4, 4)) * s[0]
    errors = {}
    for passes in (2, 3, 61):
        H_in, H_out = iterated(samples, name, passes)
        errors[passes] = float((torch.kron(H_out, H_in) - F).norm())
    torch.testing.assert_close(torch.kron(H_out, H_in), nearest)
    least = float((nearest - F).norm())
    assert errors[61] == pytest.approx(least)
    assert least < errors[3] < errors[2]


def test_token_weights_are_those_of_the_diagonal_terms() -> None:
    g = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    assert get_estimator("shampoo").token_weights(g).tolist() == [25.0, 4.0]  # pyright: ignore[reportOptionalMemberAccess]
    for name in ("kfac", "gram", "identity"):
        assert get_estimator(name).token_weights(g) is None


def test_collected_factors_approach_the_dense_fisher_of_a_whole_model(tmp_path: Path) -> None:
    """One one-token sequence many times, a new label each time: exact in the limit, here within sampling noise."""
    path = tiny_decoder("llama", tmp_path / "model", num_hidden_layers=1, initializer_range=0.5)
    case = Case(load_decoder(path), load_whole(path), [torch.tensor([77])], [])
    name, n = "model.layers.0.mlp.up_proj", 300
    stored = collected(case, tmp_path / "work", "shampoo", sequences=case.sequences * n)
    x, F = fisher_of_one_token(case.whole, case.sequences[0], name)
    H_out, H_in = stored[f"{name}.H_out"].double(), stored[f"{name}.H_in"].double()
    assert_near(H_in / H_in.trace(), torch.outer(x, x) / x.dot(x))
    assert abs(float(H_in.trace() / (F.trace() * x.dot(x))) - 1) < 0.15
    assert float((H_out / x.dot(x) - F).norm() / F.norm()) < 0.25
    data = observe(case.whole, case.sequences[0], [name])[name].G  # with the text as label: empirical Fisher
    assert float((data @ data.T / x.dot(x) - F).norm() / F.norm()) > 0.5


def fisher_of_one_token(model: Any, ids: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The input x (d_in,) and the Fisher matrix (d_out, d_out) in the linear's output."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda _m, args, y: seen.extend([args[0], y]))
    model.requires_grad_(True)
    z = logits(model, ids)[0]
    handle.remove()
    x, y = seen
    J = torch.stack([torch.autograd.grad(value, y, retain_graph=True)[0].flatten() for value in z]).double()
    p = z.detach().double().softmax(0)
    return x.detach().flatten().double(), J.T @ (torch.diag(p) - torch.outer(p, p)) @ J


# Discovery


def test_every_estimator_is_found_by_its_name_and_a_wrong_one_is_named() -> None:
    assert estimator_names() == [
        "attention_local",
        "attention_local_shampoo",
        "gram",
        "identity",
        "kfac",
        "mlp_local",
        "mlp_local_shampoo",
        "sequence",
        "shampoo",
        "token",
    ]
    for name in estimator_names():
        estimator = get_estimator(name)
        x, g = torch.randn(5, 3), torch.randn(5, 2)
        for term, size in zip(estimator.terms(x, g, True), (3, 2), strict=True):
            assert term is None or term.shape == (size, size)
        if not estimator.needs_gradients:
            assert estimator.terms(x, None, True)[1] is None
    with pytest.raises(
        ConfigError,
        match=r"'shampo' is not one of attention_local, .*gram, identity, kfac, .*sequence, shampoo",
    ):
        get_estimator("shampo")
