"""Claims of bakron.models.transforms and .flow: transforms are exact, do what they are for, and refuse by name.

Kinds: oracle (logits before), property, behaviour.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, TINY_VOCAB, tiny_model
from torch import Tensor, nn

from bakron.errors import ConfigError, ModelError
from bakron.models import Decoder, transform
from bakron.models.flow import find_norms, find_products, find_values

NAMES = [("fold",), ("rotate",), ("heads",), ("rescale",), ("fold", "rotate", "heads", "rescale")]
REFUSED = {("gemma2", "rotate"), ("gemma3", "rotate"), ("gpt2", "rescale")}
IDS = torch.randint(2, TINY_VOCAB, (40,), generator=torch.Generator().manual_seed(0))


def decoder_of(family: str = "llama", **options: Any) -> Decoder:
    return Decoder(tiny_model(family, **options))


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("names", NAMES, ids="+".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_as_they_are_or_the_transform_is_refused(
    family: str, names: tuple[str, ...], tied: bool
) -> None:
    decoder = decoder_of(family, tied=tied)
    before, original = decoder.logits(IDS), {k: v.clone() for k, v in decoder.model.named_parameters()}
    refused = sorted(name for of, name in REFUSED if of == family and name in names)
    if refused:
        with pytest.raises(ModelError, match=rf"transform {refused[0]}: .*\.0 .* Leave {refused[0]} out"):
            transform(decoder, names)
        return
    assert transform(decoder, names) is decoder
    assert distance(decoder.logits(IDS), before) < 3e-6
    decoder.check_replay(IDS)
    now = dict(decoder.model.named_parameters())
    changed = {name for name in now if name not in original or not torch.equal(now[name], original[name])}
    assert changed <= decoder.changed.keys() and changed
    assert decoder.tied == (tied and "rotate" not in names)
    assert decoder.model.config.tie_word_embeddings == decoder.tied


def test_in_float64_they_are_exact_to_its_rounding() -> None:
    decoder = Decoder(tiny_model("gpt2").double())  # the only one here whose norms compute in float64
    before = decoder.logits(IDS)
    assert distance(transform(decoder, ["fold", "rotate", "heads"]).logits(IDS), before) < 1e-13


@pytest.mark.parametrize("family", FAMILIES)
def test_folding_leaves_no_gain_in_the_blocks(family: str) -> None:
    decoder = transform(decoder_of(family), ["fold"])
    final = next(norm for norm in find_norms(decoder) if "lm_head" in norm.readers)
    for norm in find_norms(decoder):
        gain = decoder.model.get_submodule(norm.name).weight + norm.offset
        assert bool((gain == 1).all()) == (norm != final)  # the final one would cost a head of its own
    assert decoder.tied == decoder.model.config.tie_word_embeddings


def test_a_rotation_spreads_a_large_channel() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.down_proj.weight[3] *= 50
    decoder = Decoder(model)

    def peak() -> float:
        h = decoder.hidden_states([IDS])[0]
        return float((h.abs().amax(1) / h.square().mean(1).sqrt()).mean())

    before = peak()
    transform(decoder, ["rotate"])
    assert before > 4.5 and peak() < 3


def test_heads_are_rotated_one_by_one() -> None:
    decoder = decoder_of()
    W = decoder.get_weight("model.layers.0.self_attn.v_proj").unflatten(0, (2, 8))
    transform(decoder, ["heads"])
    V = decoder.get_weight("model.layers.0.self_attn.v_proj").unflatten(0, (2, 8))
    for before, after in zip(W, V, strict=True):
        assert not torch.allclose(before, after)
        torch.testing.assert_close(before.T @ before, after.T @ after)


def test_rescaled_channels_have_equal_norms_on_both_sides() -> None:
    decoder = transform(decoder_of("llama"), ["rescale"])
    weight = lambda name: decoder.get_weight(f"model.layers.1.{name}")  # noqa: E731
    torch.testing.assert_close(weight("mlp.up_proj").norm(dim=1), weight("mlp.down_proj").norm(dim=0))
    read = weight("self_attn.o_proj").square().sum(0).view(2, 2, 8).sum(1).sqrt()  # two heads read one
    torch.testing.assert_close(weight("self_attn.v_proj").norm(dim=1), read.flatten())


def test_the_seed_decides() -> None:
    weight = lambda seed: transform(decoder_of(), ["rotate", "heads"], seed).get_weight(  # noqa: E731
        "model.layers.0.self_attn.o_proj"
    )
    assert torch.equal(weight(0), weight(0))
    assert not torch.allclose(weight(0), weight(1))


# Structure


def test_norms_are_found_with_their_readers() -> None:
    llama = {norm.name: norm for norm in find_norms(decoder_of("llama"))}
    assert list(llama) == [
        f"model.layers.{b}.{name}_layernorm" for b in range(2) for name in ("input", "post_attention")
    ] + ["model.norm"]
    assert llama["model.layers.0.input_layernorm"].readers == tuple(
        f"model.layers.0.self_attn.{name}_proj" for name in "qkv"
    )
    assert llama["model.norm"].readers == ("lm_head",)
    kinds = {
        f: {(n.offset, n.centres) for n in find_norms(decoder_of(f))} for f in ("qwen3", "gemma3", "gpt2")
    }
    assert kinds == {"qwen3": {(0, False)}, "gemma3": {(1, False)}, "gpt2": {(0, True)}}


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_values_and_products_are_found_in_fused_and_grouped_linears(family: str) -> None:
    decoder = decoder_of(family)
    values, products = find_values(decoder, 1), find_products(decoder, 1)
    assert values is not None
    width, heads = 8, 4 if family == "gpt2" else 2
    first = {"llama": 0, "phi3": (4 + 2) * width, "gpt2": 8 * width}[family]
    expected = torch.arange(heads * width).view(heads, width).repeat_interleave(4 // heads, 0) + first
    assert torch.equal(values.rows, expected.flatten())
    ends = {"llama": "v_proj o_proj", "phi3": "qkv_proj o_proj", "gpt2": "c_attn c_proj"}[family].split()
    assert [values.writer.split(".")[-1], values.reader.split(".")[-1]] == ends
    if family == "gpt2":
        assert products == []
        return
    (product,) = products
    assert product.reader.endswith("down_proj") and torch.equal(
        product.rows, torch.arange(64) + (64 if family == "phi3" else 0)
    )


# Refusals


def test_a_model_that_uses_its_states_otherwise_is_refused() -> None:
    model = tiny_model("llama")
    own = model.forward

    def forward(ids: Tensor, **kwargs: Any) -> Any:
        out = own(ids, **kwargs)
        out.logits = out.logits * model.model.embed_tokens.weight[0, 0].exp()
        return out

    model.forward = forward
    with pytest.raises(ModelError, match=r"transform rotate: the logits are off by"):
        transform(Decoder(model), ["rotate"])


def test_a_head_without_a_norm_is_refused() -> None:
    model = tiny_model("llama")
    model.model.norm = nn.Identity()
    with pytest.raises(ModelError, match=r"transform rotate: lm_head does not read a norm"):
        transform(Decoder(model), ["rotate"])


def test_a_final_gain_of_zero_beside_a_bias_is_refused() -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.ln_f.weight[5] = 0
    with pytest.raises(ModelError, match=r"transform fold: transformer\.ln_f has a gain of 0"):
        transform(Decoder(model), ["rotate"])


def test_other_names_and_too_few_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"transform: 'spin' is not one of fold, rotate, heads, rescale"):
        transform(decoder_of(), ["spin"])
    with pytest.raises(ModelError, match=r"expected float32 weights, seen torch\.bfloat16"):
        transform(Decoder(tiny_model("llama").bfloat16()), ["fold"])
