"""Claims of bakron.models: replayed blocks and gradients equal the model's own; bad input is named.

Kinds: oracle (transformers' own forward and autograd over the entire model), regression, behaviour.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import BOS, FAMILIES, TINY_VOCAB, tiny_decoder, tiny_model, tiny_tokenizer
from torch import Tensor, nn

from bakron.errors import BakronError, DataError, FormatError, ModelError, NonFiniteError, ShapeError
from bakron.models import Decoder, load_decoder
from bakron.models.checkpoint import resolve_key
from bakron.models.replay import BlockCall, CallCache
from bakron.models.structure import find_blocks, find_linears


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp(request.param)
    return load_decoder(tiny_decoder(request.param, path, tied=request.param == "llama" or None))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_decoder("llama", tmp_path / "llama")


def make_ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(2, TINY_VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# Replay


@pytest.mark.parametrize("length", [1, 7, 40])
def test_replay_is_exact(decoder: Decoder, length: int) -> None:
    decoder.check_replay(make_ids(length))


def test_chain_of_blocks_equals_hidden_and_tail_equals_logits(decoder: Decoder) -> None:
    ids = make_ids(23)
    with torch.no_grad():
        h = decoder.embed(ids)
        for b in range(decoder.n_blocks):
            h = decoder.run_block(b, h)
        logits = decoder.model(ids[None], use_cache=False).logits[0]
    assert h.shape == (23, decoder.hidden_size)
    assert torch.equal(h, decoder.hidden_states([make_ids(5), ids])[1])
    assert torch.equal(decoder.tail(h), logits)
    torch.testing.assert_close(decoder.tail(h[5:9]), logits[5:9])


def test_blocks_are_causal_and_read_the_length_of_their_input(decoder: Decoder) -> None:
    long, short = decoder.hidden_states([make_ids(40), make_ids(40)[:13]])
    torch.testing.assert_close(long[:13], short, rtol=1e-4, atol=1e-4)


def test_capturing_gives_inputs_and_outputs_of_every_linear(decoder: Decoder) -> None:
    h = decoder.embed(make_ids(11))
    h_out, xs, ys = decoder.run_block_capturing(1, h, outputs=True)
    assert torch.equal(h_out, decoder.run_block(1, h))
    assert list(xs) == list(ys) == [spec.name for spec in decoder.linears[1]]
    for spec in decoder.linears[1]:
        x, y, bias = xs[spec.name], ys[spec.name], decoder.model.get_submodule(spec.name).bias
        assert x.shape == (11, spec.d_in) and y.shape == (11, spec.d_out) and not x.requires_grad
        expected = x @ decoder.get_weight(spec.name).T + (0 if bias is None else bias)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_groups_share_one_input_and_cover_all_linears_in_order(decoder: Decoder) -> None:
    _, xs = decoder.run_block_capturing(0, decoder.embed(make_ids(9)))
    groups = [[name.split(".")[-1] for name in group] for group in decoder.groups[0]]
    expected = {
        "phi3": [["qkv_proj"], ["o_proj"], ["gate_up_proj"], ["down_proj"]],
        "gpt2": [["c_attn"], ["c_proj"], ["c_fc"], ["c_proj"]],
    }
    usual = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert groups == expected.get(decoder.config.model_type, usual)
    names = [name for group in decoder.groups[0] for name in group]
    assert names == [spec.name for spec in decoder.linears[0]]
    for group in decoder.groups[0]:
        assert all(xs[name].data_ptr() == xs[group[0]].data_ptr() for name in group)
    assert decoder.other_linears == ["lm_head"]


def test_a_model_whose_blocks_depend_on_more_than_their_input_is_refused(llama: Path) -> None:
    decoder = load_decoder(llama)
    block, calls = decoder.blocks[1], [0.0]
    own = block.forward

    def stateful(*args: Any, **kwargs: Any) -> Tensor:
        calls[0] += 1.0
        return own(*args, **kwargs) + calls[0]

    decoder.check_replay(make_ids(5))
    block.forward = stateful
    with pytest.raises(ModelError, match=r"model\.layers\.1"):
        decoder.check_replay(make_ids(5))
    assert block.forward is stateful


def test_a_tail_that_reads_the_tokens_is_refused(llama: Path) -> None:
    decoder = load_decoder(llama)
    own = decoder.model.forward

    def forward(ids: Tensor, **kwargs: Any) -> Any:
        out = own(ids, **kwargs)
        out.logits = out.logits + ids[..., None]
        return out

    decoder.model.forward = forward
    with pytest.raises(ModelError, match="tail"):
        decoder.check_replay(make_ids(5))


# Gradients


def reference_gradients(decoder: Decoder, ids: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Sampled labels, and x and g of every linear by autograd through the entire model."""
    xs: dict[str, Tensor] = {}
    ys: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            y.retain_grad()
            xs[name], ys[name] = args[0].detach()[0], y

        return hook

    names = [spec.name for block in decoder.linears for spec in block]
    handles = [decoder.model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    embedding = decoder.model.get_input_embeddings().weight.requires_grad_(True)
    logits = decoder.model(ids[None], use_cache=False).logits[0]
    generator = torch.Generator().manual_seed(1)
    labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
    nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    embedding.requires_grad_(False).grad = None
    for handle in handles:
        handle.remove()
    return labels, xs, {name: y.grad[0] for name, y in ys.items() if y.grad is not None}


def test_backward_chain_equals_autograd_through_the_entire_model(decoder: Decoder) -> None:
    ids = make_ids(19)
    labels, xs, gs = reference_gradients(decoder, ids)
    states = [decoder.embed(ids)]
    for b in range(decoder.n_blocks):
        states.append(decoder.run_block(b, states[b]))
    last = states[-1].clone().requires_grad_()
    loss = nn.functional.cross_entropy(decoder.tail(last), labels, reduction="sum")
    grad = torch.autograd.grad(loss, last)[0]

    got: dict[str, tuple[Tensor, Tensor]] = {}
    for b in reversed(range(decoder.n_blocks)):
        grad = decoder.backward_block(b, states[b], grad, lambda name, x, g: got.update({name: (x, g)}))
    assert grad.shape == states[0].shape and not grad.requires_grad
    assert set(got) == set(gs) == {spec.name for block in decoder.linears for spec in block}
    for name, (x, g) in got.items():
        assert torch.equal(x, xs[name])
        torch.testing.assert_close(g, gs[name], rtol=1e-4, atol=1e-5 * float(gs[name].abs().max()))
    assert all(p.grad is None and not p.requires_grad for p in decoder.model.parameters())
    assert hook_count(decoder.model) == 0


def test_run_block_is_differentiable_and_the_same_with_gradients(decoder: Decoder) -> None:
    h = decoder.embed(make_ids(12))
    grad_out = torch.randn(h.shape, generator=torch.Generator().manual_seed(2))
    leaf = h.clone().requires_grad_()
    out = decoder.run_block(0, leaf)
    assert torch.equal(out, decoder.run_block_capturing(0, h)[0])
    expected = torch.autograd.grad(out, leaf, grad_out)[0]
    with torch.no_grad():
        assert torch.equal(decoder.backward_block(0, h, grad_out, lambda *_: None), expected)


def test_hooks_and_blocks_are_restored_after_an_exception(llama: Path) -> None:
    decoder = load_decoder(llama)
    h = decoder.embed(make_ids(6))

    def fail(*_: Any) -> None:
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        decoder.backward_block(0, h, h, fail)
    with pytest.raises(RuntimeError):
        decoder.run_block_capturing(0, h[:, :-1])
    with pytest.raises(RuntimeError):
        decoder.tail(h[:, :-1])
    assert hook_count(decoder.model) == 0
    decoder.check_replay(make_ids(6))


# Weights


def test_set_weight_round_trips_in_out_in_orientation(tmp_path: Path) -> None:
    for family in ("llama", "gpt2"):
        decoder = load_decoder(tiny_decoder(family, tmp_path / family))
        h = decoder.embed(make_ids(6))
        for spec in decoder.linears[0]:
            assert spec.transposed == (family == "gpt2")
            weight = torch.randn(spec.d_out, spec.d_in)
            decoder.set_weight(spec.name, weight)
            assert torch.equal(decoder.get_weight(spec.name), weight)
            _, xs, ys = decoder.run_block_capturing(0, h, outputs=True)
            bias = decoder.model.get_submodule(spec.name).bias
            expected = xs[spec.name] @ weight.T + (0 if bias is None else bias)
            torch.testing.assert_close(ys[spec.name], expected, rtol=1e-4, atol=1e-4)
        decoder.get_weight(decoder.linears[0][0].name).zero_()
        assert decoder.get_weight(decoder.linears[0][0].name).any()


def test_weights_that_cannot_be_set_are_refused_and_nothing_changes(llama: Path) -> None:
    decoder = load_decoder(llama, dtype=torch.float16)
    spec = decoder.linears[0][0]
    before = decoder.get_weight(spec.name)
    assert before.dtype == torch.float32 and decoder.dtype == torch.float16
    with pytest.raises(ShapeError, match=spec.name):
        decoder.set_weight(spec.name, before[:, :-1])
    with pytest.raises(NonFiniteError, match=spec.name):
        decoder.set_weight(spec.name, torch.full_like(before, 1e6))
    with pytest.raises(ModelError, match="lm_head"):
        decoder.set_weight("lm_head", before)
    assert torch.equal(decoder.get_weight(spec.name), before)


def test_tied_embeddings_stay_one_tensor(tmp_path: Path) -> None:
    for family in ("llama", "gemma2", "gpt2"):
        decoder = load_decoder(tiny_decoder(family, tmp_path / family, tied=True))
        assert decoder.tied
        assert decoder.model.get_output_embeddings().weight is decoder.model.get_input_embeddings().weight
    assert not load_decoder(tiny_decoder("llama", tmp_path / "untied", tied=False)).tied


# Loading


def test_specs_name_tensors_of_the_checkpoint(decoder: Decoder) -> None:
    assert decoder.path is not None
    stored = load_file(decoder.path / "model.safetensors")
    for b, block in enumerate(decoder.linears):
        for spec in block:
            tensor = stored[spec.tensor_key].T if spec.transposed else stored[spec.tensor_key]
            assert spec.block == b and tensor.shape == (spec.d_out, spec.d_in)
            assert torch.equal(tensor, decoder.get_weight(spec.name))


def test_facts_of_the_model(llama: Path) -> None:
    tiny_tokenizer(llama)
    decoder = load_decoder(llama)
    assert (decoder.n_blocks, decoder.hidden_size) == (2, 32)
    assert (decoder.vocab_size, decoder.max_length) == (TINY_VOCAB, 128)
    assert decoder.path == llama and decoder.device.type == "cpu" and decoder.dtype == torch.float32
    ids = decoder.tokenizer("día")["input_ids"]
    assert ids[0] == BOS and decoder.tokenizer.decode(ids[1:]) == "día"


def test_keys_without_the_models_prefix_and_shards(tmp_path: Path) -> None:
    path = tiny_decoder("gpt2", tmp_path / "gpt2")
    file = path / "model.safetensors"
    save_file({k.removeprefix("transformer."): v for k, v in load_file(file).items()}, file, {"format": "pt"})
    spec = load_decoder(path).linears[1][0]
    assert (spec.name, spec.tensor_key) == ("transformer.h.1.attn.c_attn", "h.1.attn.c_attn.weight")

    sharded = tiny_decoder("llama", tmp_path / "sharded", max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    load_decoder(sharded).check_replay(make_ids(5))
    next(sharded.glob("*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"model-0.*not found"):
        load_decoder(sharded)


def test_keys_that_are_missing_ambiguous_or_of_another_shape_name_the_layer() -> None:
    def resolve(shapes: dict[str, tuple[int, ...]]) -> str:
        return resolve_key("model.layers.0.q.weight", "model.layers", (2, 3), shapes)

    assert resolve({"model.layers.0.q.weight": (2, 3), "x.model.layers.0.q.weight": (2, 3)}).startswith(
        "model"
    )
    assert resolve({"language.layers.0.q.weight": (2, 3)}) == "language.layers.0.q.weight"
    with pytest.raises(ModelError, match=r"model\.layers\.0\.q\.weight: the checkpoint has no tensor"):
        resolve({"model.layers.1.q.weight": (2, 3), "0.q.weight": (2, 3), "xlayers.0.q.weight": (2, 3)})
    with pytest.raises(ModelError, match=r"model\.layers\.0\.q\.weight: several"):
        resolve({"a.layers.0.q.weight": (2, 3), "b.layers.0.q.weight": (2, 3)})
    with pytest.raises(ModelError, match=r"model\.layers\.0\.q\.weight: .*\(2, 3\).*\(3, 2\)"):
        resolve({"model.layers.0.q.weight": (3, 2)})


def test_loading_prints_nothing_and_leaves_transformers_as_it_was(llama: Path) -> None:
    code = (
        "import sys, transformers; from bakron.models import load_decoder\n"
        f"load_decoder({str(llama)!r}, device='cpu')\n"
        "assert transformers.utils.logging.is_progress_bar_enabled()\n"
        "assert transformers.utils.logging.get_verbosity() == transformers.utils.logging.WARNING\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"
BREAKS: dict[str, tuple[Callable[[Path], Any], type[BakronError], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), ModelError, "no config.json"),
    "bad json": (lambda p: (p / "config.json").write_text("{"), ModelError, "not valid JSON"),
    "unknown type": (lambda p: edit_config(p, model_type="zebra"), ModelError, "zebra"),
    "encoder": (
        lambda p: edit_config(p, model_type="bert", architectures=["BertForMaskedLM"]),
        ModelError,
        "causal language model, seen BertForMaskedLM",
    ),
    "encoder-decoder": (
        lambda p: edit_config(p, model_type="t5", architectures=["T5ForConditionalGeneration"]),
        ModelError,
        "causal language model, seen T5",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), ModelError, "save_pretrained"),
    "damaged file": (
        lambda p: (p / "model.safetensors").write_bytes(b"x" * 99),
        ModelError,
        "not a readable",
    ),
    "missing weight": (lambda p: edit_tensors(p, lambda t: t.pop(UP)), ModelError, UP),
    "missing norm": (
        lambda p: edit_tensors(p, lambda t: t.pop("model.norm.weight")),
        ModelError,
        r"not in the checkpoint: model\.norm\.weight",
    ),
    "wrong shape": (lambda p: edit_config(p, intermediate_size=48), ModelError, "cannot load"),
    "nan": (lambda p: edit_tensors(p, lambda t: t[UP][3].fill_(float("nan"))), NonFiniteError, UP),
    "inf in a norm": (
        lambda p: edit_tensors(p, lambda t: t["model.norm.weight"].fill_(float("inf"))),
        NonFiniteError,
        r"model\.norm\.weight",
    ),
    "gptq": (
        lambda p: edit_config(p, quantization_config={"quant_method": "gptq", "bits": 4}),
        ModelError,
        "already quantized by 'gptq'",
    ),
}


@pytest.mark.parametrize("case", BREAKS)
def test_broken_checkpoints_are_refused_by_name(llama: Path, case: str) -> None:
    breaks, error, message = BREAKS[case]
    breaks(llama)
    with pytest.raises(error, match=message):
        load_decoder(llama)


def test_tensors_without_a_place_are_warned_of(llama: Path) -> None:
    edit_tensors(llama, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
    with pytest.warns(UserWarning, match=r"model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_decoder(llama)


def test_missing_directories_hub_names_and_tokenizers(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        load_decoder(llama / "nowhere")
    with pytest.raises(ModelError, match="expected the directory"):
        load_decoder(llama / "config.json")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="the hub gave no model"):
        load_decoder("nobody/no-such-model")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        _ = load_decoder(llama).tokenizer


def test_token_ids_are_checked(llama: Path) -> None:
    decoder = load_decoder(llama)
    with pytest.raises(ShapeError, match=r"\(1, 5\)"):
        decoder.embed(make_ids(5)[None])
    for bad in (make_ids(129), make_ids(0), torch.tensor([3, TINY_VOCAB]), torch.tensor([-1])):
        with pytest.raises(DataError, match="Token ids"):
            decoder.hidden_states([bad])


# Structure


def test_fused_experts_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.gate_up_proj"):
        Decoder(tiny_model("mixtral"))


class Experts(nn.Module):
    """A mixture-of-experts block in the style of one module per matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 4)
        self.mlp = nn.Module()
        self.mlp.gate = nn.Linear(4, 3)
        self.mlp.scorer = nn.Linear(4, 3)
        self.mlp.shared_expert_gate = nn.Linear(4, 1)
        self.mlp.shared_expert = nn.ModuleDict({"gate_proj": nn.Linear(4, 8)})
        self.mlp.experts = nn.ModuleList(nn.ModuleDict({"up_proj": nn.Linear(4, 3)}) for _ in range(3))
        self.conv = nn.Conv1d(4, 4, 2)


def test_routers_are_left_out_and_blocks_are_the_outermost_list() -> None:
    inner = nn.ModuleList(Experts() for _ in range(2))
    model = nn.ModuleDict({"norms": nn.ModuleList(nn.LayerNorm(4) for _ in range(9)), "blocks": inner})
    path, blocks = find_blocks(model)
    assert (path, blocks) == ("blocks", list(inner))
    experts = [f"b.mlp.experts.{e}.up_proj" for e in range(3)]
    assert list(find_linears(blocks[0], "b", 3)) == ["b.q_proj", "b.mlp.shared_expert.gate_proj", *experts]


def test_a_model_without_linears_is_refused() -> None:
    with pytest.raises(ModelError, match="no list of decoder blocks"):
        find_blocks(nn.ModuleDict({"norms": nn.ModuleList(nn.LayerNorm(4) for _ in range(3))}))


def test_call_cache_is_bounded_by_bytes() -> None:
    recorded: list[int] = []

    def record(length: int) -> list[BlockCall]:
        recorded.append(length)
        mask = torch.zeros(length)
        return [BlockCall((mask,), {"pair": (mask[1:], None)}, keyword=False)] * 2

    cache = CallCache(record, max_bytes=4 * 30)
    for length in (10, 20, 10, 15, 10, 20, 99, 99):
        assert cache.get(length)[0].args[0].shape == (length,)
    assert recorded == [10, 20, 15, 20, 99]


# Already quantized checkpoints


def compress(
    path: Path, groups: dict[str, Any], bits_of: Callable[[str], int], symmetric: bool
) -> dict[str, Tensor]:
    """Rewrite a checkpoint as compressed-tensors pack-quantized; returns the dense weights it stands for."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    dense: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(path / "model.safetensors")
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        bits, (rows, columns) = bits_of(key), tensors.pop(key).shape
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
        codes = torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.int8)
        zeros = torch.randint(low, high, (rows, columns // 16), generator=generator, dtype=torch.int8)
        scale = (0.1 + torch.rand(rows, columns // 16, generator=generator)).to(torch.bfloat16) / 2**bits
        name = key.removesuffix(".weight")
        tensors |= {
            f"{name}.weight_packed": pack_to_int32(codes, bits),
            f"{name}.weight_scale": scale,
            f"{name}.weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            tensors[f"{name}.weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0).contiguous()
        steps = codes.int() - (0 if symmetric else zeros.int().repeat_interleave(16, 1))
        dense[name] = steps.to(torch.bfloat16) * scale.repeat_interleave(16, 1)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config_groups = {
        group: {"targets": targets, "weights": {"num_bits": bits, "type": "int", "symmetric": symmetric,
                                                "strategy": "group", "group_size": 16, "dynamic": False}}
        for group, (targets, bits) in groups.items()
    }  # fmt: skip
    edit_config(path, quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized",
                                           "quantization_status": "compressed", "ignore": ["lm_head"],
                                           "config_groups": config_groups})  # fmt: skip
    return dense


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_checkpoints_load_as_the_exact_dense_weights(tmp_path: Path, symmetric: bool) -> None:
    path = tiny_decoder("llama", tmp_path / "model", tied=True, dtype=torch.bfloat16)
    down, attention = ([r"re:.*down_proj$"], 3), ([r"re:.*self_attn.*"], 8)
    groups = {"group_0": (["Linear"], 4), "group_1": down, "group_2": attention}
    dense = compress(path, groups, lambda k: 3 if "down" in k else 8 if "self_attn" in k else 4, symmetric)
    decoder = load_decoder(path)
    assert decoder.dtype == torch.float32 and decoder.tied
    assert set(dense) == {spec.name for block in decoder.linears for spec in block}
    for spec in decoder.linears[0] + decoder.linears[1]:
        assert spec.tensor_key == f"{spec.name}.weight"
        assert torch.equal(decoder.get_weight(spec.name), dense[spec.name].float()), spec.name
    decoder.check_replay(make_ids(9))


def test_a_compressed_layer_that_no_group_targets_is_refused(tmp_path: Path) -> None:
    path = tiny_decoder("llama", tmp_path / "model", dtype=torch.bfloat16)
    compress(path, {"group_0": ([r"re:.*self_attn.*"], 4)}, lambda _: 4, True)
    with pytest.raises(FormatError, match=r"mlp\.\w+_proj"):
        load_decoder(path)
