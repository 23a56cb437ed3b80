"""Claims about local estimators: their factors are those of the true error at the MLP's output, at scores and at heads.

1. The quadratic form Σ_t x_tᵀEᵀM_tE x_t, with M_t from a dense Jacobian, is the squared change that a small error E of
   a weight makes inside the transformers model: of the MLP's output, of the scores, of what each head writes.
2. The collected factors are the KFAC and Shampoo factorisations of that sum, taken by explicit loops: grouped heads,
   rotary positions, biases, causal and sliding masks, MLPs with and without gate; all other linears as gram.
3. Models whose blocks are built otherwise are refused by name.

Kinds: oracle in float64, behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from autograd_oracle import assert_near
from tiny_models import TINY_VOCAB, tiny_decoder
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv
from transformers.pytorch_utils import Conv1D

from bakron.errors import ModelError
from bakron.estimators import get_estimator
from bakron.estimators.attention_local import AttentionLocal
from bakron.models import check_views, load_decoder
from bakron.run.collect import Need, collect, factors
from bakron.run.factors import unpacked
from bakron.run.progress import Silent
from bakron.run.store import Store

LENGTHS = (13, 6)
WINDOW = {"mistral": 8}  # of tiny_models
BLOCK = 1
ATTENTION = ("llama", "mistral", "qwen2", "gemma")


@dataclass
class Seen:
    """One sequence in a float64 model: module path → input (T, d_in) and output; arguments of the attention."""

    x: dict[str, Tensor]
    y: dict[str, Tensor]
    rotary: tuple[Tensor, Tensor] | None
    P: Tensor


@dataclass
class Case:
    family: str
    path: Path
    whole: Any
    sequences: list[Tensor]
    seen: list[Seen]

    @property
    def block(self) -> Any:
        return self.whole.get_submodule(self.name(""))

    def name(self, end: str) -> str:
        root = "transformer.h.1" if self.family == "gpt2" else "model.layers.1"
        return f"{root}.{end}".rstrip(".")

    def weight(self, end: str) -> Tensor:
        module = self.block.get_submodule(end)
        return module.weight.detach().T if isinstance(module, Conv1D) else module.weight.detach()


def see(whole: Any, root: str, ids: Tensor) -> Seen:
    x: dict[str, Tensor] = {}
    y: dict[str, Tensor] = {}
    arguments: dict[str, Any] = {}
    block = whole.get_submodule(root)

    def note(end: str) -> Callable[..., None]:
        def hook(_m: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
            x[end], y[end] = args[0][0].detach(), out[0].detach()

        return hook

    handles = [
        module.register_forward_hook(note(end))
        for end, module in block.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
    ]
    handles.append(
        block.register_forward_pre_hook(lambda _m, _a, kwargs: arguments.update(kwargs), with_kwargs=True)
    )
    with torch.no_grad():
        out = whole(ids[None], use_cache=False, output_attentions=True)
    for handle in handles:
        handle.remove()
    return Seen(x, y, arguments.get("position_embeddings"), out.attentions[BLOCK][0])


def make_case(family: str, path: Path) -> Case:
    tiny_decoder(family, path)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    whole = whole.double().eval()
    generator = torch.Generator().manual_seed(4)
    sequences = [torch.randint(2, TINY_VOCAB, (length,), generator=generator) for length in LENGTHS]
    root = "transformer.h.1" if family == "gpt2" else "model.layers.1"
    return Case(family, path, whole, sequences, [see(whole, root, ids) for ids in sequences])


@pytest.fixture(scope="module", params=[*ATTENTION, "gpt2"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp(request.param))


def local_errors(case: Case, seen: Seen) -> dict[str, Callable[[Tensor], Tensor]]:
    """For each linear with an H_out: what its output (T, d_out) makes of itself, the rest of the sequence being given."""
    block = case.block
    if case.family == "gpt2":
        return {"mlp.c_fc": lambda z: block.mlp.act(z) @ case.weight("mlp.c_proj").T}
    D, W_o = case.weight("mlp.down_proj"), case.weight("self_attn.o_proj")
    gate, up = seen.y["mlp.gate_proj"], seen.y["mlp.up_proj"]
    q, k = seen.y["self_attn.q_proj"], seen.y["self_attn.k_proj"]
    position = torch.arange(len(q))
    distance = position[:, None] - position
    visible = (distance >= 0) & (distance < WINDOW.get(case.family, len(q)))

    def heads(y: Tensor) -> Tensor:
        return y.view(1, len(y), -1, 8).transpose(1, 2)

    def scores(q: Tensor, k: Tensor) -> Tensor:
        assert seen.rotary is not None
        Q, K = apply_rotary_pos_emb(heads(q), heads(k), *seen.rotary)
        return (Q @ repeat_kv(K, 2).transpose(2, 3))[0] * visible

    def written(v: Tensor) -> Tensor:
        """What each head adds to the attention's output (H, T, d)."""
        mixed = seen.P @ repeat_kv(heads(v), 2)[0]
        return torch.einsum("htc,dhc->htd", mixed, W_o.view(-1, 4, 8))

    return {
        "mlp.gate_proj": lambda z: (block.mlp.act_fn(z) * up) @ D.T,
        "mlp.up_proj": lambda z: (block.mlp.act_fn(gate) * z) @ D.T,
        "self_attn.q_proj": lambda z: scores(z, k),
        "self_attn.k_proj": lambda z: scores(q, z),
        "self_attn.v_proj": written,
    }


def jacobian(error: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    """(outputs, T, d_out)."""
    return torch.func.jacrev(error)(y).flatten(0, -3)


# 1. The true error


def test_the_quadratic_form_is_the_squared_change_in_the_model(case: Case) -> None:
    """Of q, k and v and of the MLP's output, after a small random error of each weight."""
    generator = torch.Generator().manual_seed(1)
    ends = list(local_errors(case, case.seen[0]))
    for end in ends:
        module = case.block.get_submodule(end)
        E = 1e-5 * torch.randn(case.weight(end).shape, generator=generator, dtype=torch.float64)
        before = module.weight.detach().clone()
        with torch.no_grad():
            module.weight += E.T if isinstance(module, Conv1D) else E
        after = [see(case.whole, case.name(""), ids) for ids in case.sequences]
        with torch.no_grad():
            module.weight.copy_(before)
        measured, predicted = 0.0, 0.0
        for old, new in zip(case.seen, after, strict=True):
            error = local_errors(case, old)[end]
            if end.startswith("mlp"):
                down = "mlp.c_proj" if case.family == "gpt2" else "mlp.down_proj"
                change = new.y[down] - old.y[down]
            else:
                change = error(new.y[end]) - error(old.y[end])
            measured += float(change.square().sum())
            J = jacobian(error, old.y[end])
            if end.endswith("v_proj"):  # one output of v enters many tokens' outputs
                predicted += float(torch.einsum("atk,kn,tn->a", J, E, old.x[end]).square().sum())
            else:
                M = torch.einsum("atk,atl->tkl", J, J)
                moved = old.x[end] @ E.T
                predicted += float(torch.einsum("tk,tkl,tl->", moved, M, moved))
        assert measured == pytest.approx(predicted, rel=1e-3), end
        assert measured > 0


def test_attention_in_the_model_is_what_the_heads_write(case: Case) -> None:
    """So that the local errors above are those of the model: what all heads write is the attention's output."""
    if case.family == "gpt2":
        pytest.skip("its query, key and value are one linear")
    for seen in case.seen:
        written = local_errors(case, seen)["self_attn.v_proj"](seen.y["self_attn.v_proj"])
        assert_near(written.sum(0), seen.y["self_attn.o_proj"], 1e-6)


# 2. The factorisations


def collected(case: Case, store: Path, name: str, H_in: bool = True) -> dict[str, Tensor]:
    need = Need(name, boundaries=False, H_in=H_in, gradients=False)
    opened = Store(store, {})
    collect(load_decoder(case.path), case.sequences, need, opened, 0, Silent())
    return unpacked(opened.load(factors(need, BLOCK)))


def expected_sums(case: Case, end: str, shampoo: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """H_in, H_out and token weights by loops over sequences, and over tokens or heads."""
    x_sum, M_sum, n = 0.0, 0.0, sum(LENGTHS)
    weights = []
    for seen in case.seen:
        x = seen.x[end]
        J = jacobian(local_errors(case, seen)[end], seen.y[end])
        if end.endswith("v_proj"):
            W = case.weight("self_attn.o_proj").view(-1, 4, 8)
            weight = torch.zeros(len(x), dtype=torch.float64)
            for h, P in enumerate(seen.P):
                A = (P @ x).T @ (P @ x)
                M = torch.zeros(16, 16, dtype=torch.float64)
                part = slice(8 * (h // 2), 8 * (h // 2) + 8)
                M[part, part] = W[:, h].T @ W[:, h]
                x_sum = x_sum + A * (M.trace() if shampoo else 1 / 4)
                M_sum = M_sum + M * (A.trace() if shampoo else len(x))
                weight += (P**2).sum(0) * (M.trace() if shampoo else 1 / 4)
            weights.append(weight)
            continue
        for t in range(len(x)):
            M, square = J[:, t].T @ J[:, t], x[t].dot(x[t])
            x_sum = x_sum + torch.outer(x[t], x[t]) * (M.trace() if shampoo else 1)
            M_sum = M_sum + M * (square if shampoo else 1)
            weights.append(M.trace()[None])
    assert isinstance(x_sum, Tensor) and isinstance(M_sum, Tensor)
    has_weights = shampoo or end.endswith("v_proj")
    return x_sum / n, M_sum / n, torch.cat(weights) if has_weights else None


@pytest.mark.parametrize("shampoo", [False, True])
def test_factors_are_those_of_explicit_sums(case: Case, tmp_path: Path, shampoo: bool) -> None:
    family = "mlp_local" if case.family == "gpt2" else "attention_local"
    stored = collected(case, tmp_path, family + ("_shampoo" if shampoo else ""))
    shared = {"up_proj": "gate_proj"} if not shampoo else {}
    ends = [end for end in case.seen[0].x if f"{end}" != "mlp.act"]
    for end in ends:
        name = case.name(end)
        first = name.replace(*next(iter(shared.items()))) if end.endswith(tuple(shared)) else name
        if end in local_errors(case, case.seen[0]):
            H_in, H_out, weights = expected_sums(case, end, shampoo)
            assert_near(stored[f"{name}.H_out"], H_out)
            assert (weights is None) == (f"{name}.token_weights" not in stored)
            if weights is not None:
                assert_near(stored[f"{name}.token_weights"], weights)
        else:
            x = torch.cat([seen.x[end] for seen in case.seen])
            H_in = x.T @ x / len(x)
            assert f"{name}.H_out" not in stored and f"{name}.token_weights" not in stored
        assert_near(stored[f"{first}.H_in"], H_in)


def test_mlp_local_leaves_attention_to_gram_and_agrees_in_the_mlp(case: Case, tmp_path: Path) -> None:
    if case.family == "gpt2":
        pytest.skip("attention_local has no part in it")
    mlp, attention = (collected(case, tmp_path, name) for name in ("mlp_local", "attention_local"))
    assert all(torch.equal(value, attention[key]) for key, value in mlp.items() if ".mlp." in key)
    assert not [key for key in mlp if "self_attn" in key and not key.endswith(".H_in")]


def test_without_H_in_the_rest_is_the_same(case: Case, tmp_path: Path) -> None:
    name = "mlp_local_shampoo" if case.family == "gpt2" else "attention_local_shampoo"
    full, rest = (collected(case, tmp_path, name, H_in) for H_in in (True, False))
    assert set(rest) == {key for key in full if not key.endswith(".H_in")}
    assert all(torch.equal(value, full[key]) for key, value in rest.items())


# 3. Refusals


@pytest.mark.parametrize(
    ("family", "name", "match"),
    [
        ("gpt2", "attention_local", r"transformer\.h\.0: its attention has 0 .*q_proj.*mlp_local"),
        ("phi3", "attention_local", r"model\.layers\.0: its MLP has 0 .*gate_proj.*shampoo"),
        ("phi3", "mlp_local_shampoo", r"model\.layers\.0: its MLP has 0"),
        ("qwen3", "attention_local_shampoo", r"model\.layers\.0: its attention is not softmax.*mlp_local"),
        ("gemma3", "attention_local", r"model\.layers\.0: its attention is not softmax"),
    ],
)
def test_other_blocks_are_refused_by_name(tmp_path: Path, family: str, name: str, match: str) -> None:
    decoder = load_decoder(tiny_decoder(family, tmp_path))
    with pytest.raises(ModelError, match=match):
        check_views(decoder, get_estimator(name).sees)  # pyright: ignore[reportAttributeAccessIssue]


def test_mlp_local_does_not_look_at_the_attention(tmp_path: Path) -> None:
    check_views(load_decoder(tiny_decoder("qwen3", tmp_path)), get_estimator("mlp_local").sees)  # pyright: ignore[reportAttributeAccessIssue]


def test_an_mlp_of_another_formula_is_refused(tmp_path: Path) -> None:
    decoder = load_decoder(tiny_decoder("llama", tmp_path))
    check_views(decoder, AttentionLocal.sees)
    mlp = decoder.model.get_submodule("model.layers.1.mlp")
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x) + 0.1)
    with pytest.raises(ModelError, match=r"model\.layers\.1: its MLP is not act\(gate\)·up before"):
        check_views(decoder, AttentionLocal.sees)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_check(tmp_path: Path, dtype: torch.dtype) -> None:
    for family in ATTENTION:
        path = tiny_decoder(family, tmp_path / family)
        check_views(load_decoder(path, dtype=dtype), AttentionLocal.sees)
