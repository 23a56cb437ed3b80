"""Claims about exports: what is on disk is what was solved, for independent loaders, or nothing is on disk at all.

1. Packing is a bijection and agrees with the compressed-tensors package.
2. transformers, reading compressed-tensors, computes logits equal to those of the dense export (difference 0.0).
3. The output is whole, deterministic, lists exactly its files, and carries all auxiliary files; it replaces nothing.
4. Whatever cannot be stored is refused, by name, before or without leaving anything behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, GPT2Config, LlamaConfig

from bakron import exporters
from bakron.core.layers import LinearSpec, Scheme, SolvedLayer
from bakron.errors import (
    ConfigError,
    DiskSpaceError,
    FormatError,
    NonFiniteError,
    OutputExistsError,
)
from bakron.exporters import get_exporter, plan, writer
from bakron.exporters.card import model_card
from bakron.exporters.packing import n_words, pack_signed, pack_unsigned, unpack_signed, unpack_unsigned
from bakron.exporters.plan import Changes, plan_export
from bakron.exporters.stored import stored_weights
from bakron.exporters.writer import write_checkpoint

IDS = torch.arange(12).reshape(1, -1) * 7 % 96
DEFAULT = Scheme(bits=4, group_size=32, symmetric=True)
Solved = dict[str, Callable[[], SolvedLayer]]


def save_llama(
    path: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32, layers: int = 2, **options: Any
) -> Path:
    """A tiny Llama with random weights, saved by transformers."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(path, **options)
    return path


def load(path: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto", **options)


def specs_of(model: Any, kinds: Sequence[str] = ("Linear", "Conv1D")) -> list[LinearSpec]:
    """Every linear layer of the decoder blocks."""
    found = [(n, m) for n, m in model.named_modules() if type(m).__name__ in kinds and n != "lm_head"]
    specs = []
    for name, module in found:
        transposed = type(module).__name__ == "Conv1D"
        shape = module.weight.shape[::-1] if transposed else module.weight.shape
        specs.append(LinearSpec(name, f"{name}.weight", 0, shape[0], shape[1], transposed))
    return specs


def solve(spec: LinearSpec, scheme: Scheme, dtype: torch.dtype = torch.float32) -> SolvedLayer:
    """A layer with random codes over the whole range and random scales."""
    generator = torch.Generator().manual_seed(sum(spec.name.encode()))
    n_groups = 1 if scheme.group_size == -1 else spec.d_in // scheme.group_size
    low, high = -(1 << (scheme.bits - 1)), 1 << (scheme.bits - 1)
    codes = torch.randint(low, high, (spec.d_out, spec.d_in), generator=generator, dtype=torch.int8)
    scale = (torch.rand((spec.d_out, n_groups), generator=generator) + 0.5) * (0.3 / high)
    zero = torch.randint(low, high, (spec.d_out, n_groups), generator=generator, dtype=torch.int8)
    zero = torch.zeros_like(zero) if scheme.symmetric else zero
    return SolvedLayer(spec, scheme, codes, scale.to(dtype), zero)


def solve_all(source: Path, scheme: Scheme, dtype: torch.dtype = torch.float32) -> Solved:
    specs = specs_of(load(source))
    return {spec.tensor_key: (lambda spec=spec: solve(spec, scheme, dtype)) for spec in specs}


def export(
    source: Path,
    out: Path,
    layers: Solved,
    scheme: Scheme | dict[str, Scheme],
    name: str = "compressed_tensors",
    **options: Any,
) -> Path:
    options = {"ignore": ["lm_head"], "card": "card\n", **options}
    schemes = dict.fromkeys(layers, scheme) if isinstance(scheme, Scheme) else scheme
    return write_checkpoint(source, out, get_exporter(name), layers, schemes, **options)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def layers(source: Path) -> Solved:
    return solve_all(source, DEFAULT)


# --- packing -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(1, 8), rows=st.integers(1, 4), n=st.integers(1, 140), seed=st.integers(0, 2**20))
def test_packing_is_a_bijection_and_agrees_with_compressed_tensors(
    bits: int, rows: int, n: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    codes = torch.randint(low, high, (rows, n), generator=generator, dtype=torch.int8)
    words = pack_signed(codes, bits)
    assert words.shape == (rows, n_words(n, bits)) and words.dtype == torch.int32
    assert torch.equal(words, pack_to_int32(codes, bits))
    assert torch.equal(unpack_signed(words, bits, n), codes)
    assert torch.equal(unpack_from_int32(words, bits, codes.shape), codes)
    unsigned = codes.to(torch.int16) - low
    assert torch.equal(pack_unsigned(unsigned, bits), words)
    assert torch.equal(unpack_unsigned(words, bits, n).to(torch.int16), unsigned)


@pytest.mark.parametrize("bits", range(2, 9))
def test_packing_writes_the_stream_bit_by_bit(bits: int) -> None:
    codes = [(5 * i + 3) % (1 << bits) for i in range(37)]
    stream = sum(code << (i * bits) for i, code in enumerate(codes))
    expected = stream.to_bytes(4 * n_words(37, bits), "little")
    assert pack_unsigned(torch.tensor([codes]), bits).numpy().tobytes() == expected


def test_packing_refuses_codes_out_of_range_and_wrong_lengths() -> None:
    with pytest.raises(FormatError, match="0 to 7, seen 0 to 8"):
        pack_unsigned(torch.tensor([0, 8]), 3)
    with pytest.raises(FormatError, match="seen -1 to"):
        pack_signed(torch.tensor([0, -5]), 3)
    with pytest.raises(FormatError, match="expected 1 to 8"):
        pack_unsigned(torch.tensor([0]), 9)
    with pytest.raises(FormatError, match="take 2 words, seen 1"):
        unpack_unsigned(torch.zeros((1, 1), dtype=torch.int32), 3, 11)


# --- exactness ---------------------------------------------------------------------------------------------------

CASES = [
    (Scheme(2, 32, True), False, torch.float32),
    (Scheme(3, 32, True), True, torch.float32),
    (Scheme(4, 32, True), False, torch.float32),
    (Scheme(4, 32, True), True, torch.bfloat16),
    (Scheme(4, -1, True), True, torch.float32),
    (Scheme(3, -1, True), False, torch.bfloat16),
    (Scheme(5, 16, True), False, torch.float32),
    (Scheme(8, 32, True), False, torch.bfloat16),
    (Scheme(8, -1, True), False, torch.float32),
    (Scheme(4, 32, False), False, torch.float32),
    (Scheme(4, 32, False), True, torch.bfloat16),
    (Scheme(3, -1, False), False, torch.float32),
]


@pytest.mark.parametrize(("scheme", "tied", "dtype"), CASES)
def test_a_packed_model_equals_the_dense_one_exactly(
    tmp_path: Path, scheme: Scheme, tied: bool, dtype: torch.dtype
) -> None:
    source = save_llama(tmp_path / "source", tied=tied, dtype=dtype)
    layers = solve_all(source, scheme, dtype)
    packed = export(source, tmp_path / "packed", layers, scheme)
    dense = export(source, tmp_path / "dense", layers, scheme, "dense")

    expected = load(dense)
    for key, layer in layers.items():
        assert torch.equal(expected.get_parameter(key), layer().weight())
    dequantized = load(packed, quantization_config=CompressedTensorsConfig(dequantize=True))
    for name, value in expected.state_dict().items():
        assert torch.equal(dequantized.state_dict()[name], value), name
    assert torch.equal(logits(dequantized), logits(expected))
    if scheme.symmetric:
        assert torch.equal(logits(load(packed)), logits(expected))
    stored = dict(stored_weights(packed))
    assert stored.keys() == load_file(source / "model.safetensors").keys()
    for key, value in stored_weights(dense):
        assert value.dtype == stored[key].dtype == dtype and torch.equal(stored[key], value)
    assert ("lm_head.weight" in stored) is not tied


MIXED = (Scheme(2, 16, True), Scheme(3, 32, True), Scheme(4, -1, True), Scheme(8, 32, True))


def mix(
    source: Path, dtype: torch.dtype, schemes: Sequence[Scheme] = MIXED
) -> tuple[Solved, dict[str, Scheme]]:
    """Layers in ``schemes`` by turns, but with the same one for q, k, v and for gate, up, as engines need it."""
    layers, chosen = {}, {}
    parts = ("self_attn.o", "self_attn", "down", "mlp")
    for spec in specs_of(load(source)):
        part = next(i for i, name in enumerate(parts) if name in spec.name)
        block = int(spec.name.split(".")[2])
        scheme = chosen[spec.tensor_key] = schemes[(part + 3 * block) % len(schemes)]
        layers[spec.tensor_key] = lambda spec=spec, scheme=scheme: solve(spec, scheme, dtype)
    assert set(chosen.values()) == set(schemes)
    return layers, chosen


@pytest.mark.parametrize(
    ("tied", "dtype"), [(False, torch.float32), (True, torch.bfloat16), (True, torch.float32)]
)
def test_a_packed_model_of_several_schemes_equals_the_dense_one_exactly(
    tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    source = save_llama(tmp_path / "source", tied=tied, dtype=dtype, layers=12)
    layers, schemes = mix(source, dtype)
    packed = export(source, tmp_path / "packed", layers, schemes)
    dense = export(source, tmp_path / "dense", layers, schemes, "dense")
    expected, loaded = load(dense), load(packed)
    assert torch.equal(logits(loaded), logits(expected))
    for key, layer in layers.items():  # dense since that forward
        assert torch.equal(loaded.get_parameter(key), layer().weight()), key
        assert torch.equal(expected.get_parameter(key), layer().weight()), key
    stored = dict(stored_weights(packed))
    for key, value in stored_weights(dense):
        assert torch.equal(stored[key], value), key
    assert ("lm_head.weight" in stored) is not tied


def test_several_schemes_are_groups_that_name_each_layer_exactly(tmp_path: Path) -> None:
    """Class names would catch fused layers in engines, and prefixes catch block 10 with block 1."""
    source = save_llama(tmp_path / "source", layers=12)
    layers, schemes = mix(source, torch.float32)
    config = json.loads((export(source, tmp_path / "out", layers, schemes) / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    assert list(groups) == ["group_0", "group_1", "group_2", "group_3"]
    seen = {}
    for group in groups.values():
        weights = group["weights"]
        scheme = Scheme(weights["num_bits"], weights["group_size"] or -1, weights["symmetric"])
        assert weights["strategy"] == ("channel" if scheme.group_size == -1 else "group")
        for target in group["targets"]:
            assert target not in seen
            seen[f"{target}.weight"] = scheme
    assert seen == schemes


def test_the_plan_and_the_bytes_of_several_schemes(tmp_path: Path, source: Path) -> None:
    layers, schemes = mix(source, torch.float32)
    expected = plan_export(source, get_exporter("compressed_tensors"), schemes)
    out = export(source, tmp_path / "out", layers, schemes, max_shard_bytes=9_000)
    stored = {key: value for file in out.glob("*.safetensors") for key, value in load_file(file).items()}
    copied = load_file(source / "model.safetensors").keys() - layers.keys()
    assert expected.quantized_bytes == sum(value.nbytes for key, value in stored.items() if key not in copied)
    backwards = dict(reversed(layers.items())), dict(reversed(schemes.items()))
    assert contents(export(source, tmp_path / "again", *backwards, max_shard_bytes=9_000)) == contents(out)


def test_zero_points_beside_another_scheme_are_refused(tmp_path: Path, source: Path) -> None:
    """transformers 5.24 reads all layers with the first scheme when it resolves zero points, so this loads nowhere."""
    specs = specs_of(load(source))
    mixed = {Scheme(4, 32, False): specs[:3], Scheme(3, 32, True): specs[3:]}
    with pytest.raises(
        FormatError, match="3 bit, group 32; 4 bit, group 32, asymmetric.*symmetric, or choose"
    ):
        get_exporter("compressed_tensors").check(mixed)
    get_exporter("dense").check(mixed)


def test_asymmetric_packed_weights_do_not_load_wrongly_without_dequantize(
    tmp_path: Path, source: Path
) -> None:
    """The card asks for dequantize=True; a loader that ignores this may refuse, but must not compute other logits."""
    scheme = replace(DEFAULT, symmetric=False)
    layers = solve_all(source, scheme)
    packed = export(source, tmp_path / "packed", layers, scheme)
    dense = export(source, tmp_path / "dense", layers, scheme, "dense")
    assert "dequantize=True" in get_exporter("compressed_tensors").usage([scheme])
    try:
        model = load(packed)
    except RuntimeError:
        return
    assert torch.equal(logits(model), logits(load(dense)))


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_usage_on_the_card_loads_the_model(tmp_path: Path, source: Path, symmetric: bool) -> None:
    scheme = replace(DEFAULT, symmetric=symmetric)
    layers = solve_all(source, scheme)
    models = []
    for name in ("compressed_tensors", "dense"):
        names: dict[str, Any] = {"path": export(source, tmp_path / name, layers, scheme, name)}
        exec(get_exporter(name).usage([scheme]), names)  # noqa: S102
        models.append(names["model"])
    assert torch.equal(logits(models[0]), logits(models[1]))


def test_dense_holds_transposed_layers_and_compressed_tensors_refuses_them(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=16, n_inner=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    specs = specs_of(load(tmp_path / "source"))
    layers: Solved = {spec.tensor_key: (lambda spec=spec: solve(spec, DEFAULT)) for spec in specs}
    assert [spec.transposed for spec in specs] == [True] * 4
    model = load(export(tmp_path / "source", tmp_path / "dense", layers, DEFAULT, "dense"))
    for key, layer in layers.items():
        assert torch.equal(model.get_parameter(key), layer().weight().T)
    with pytest.raises(FormatError, match="only the format 'dense'"):
        get_exporter("compressed_tensors").check({DEFAULT: specs})
    with pytest.raises(FormatError, match="only the format 'dense'"):
        export(tmp_path / "source", tmp_path / "packed", layers, DEFAULT)
    assert not (tmp_path / "packed").exists()


def test_scales_must_have_the_dtype_that_loaders_use(tmp_path: Path, layers: Solved) -> None:
    """A float32 checkpoint whose config.json says bfloat16 is loaded as bfloat16, scales included."""
    source = save_llama(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert (
        plan_export(source, get_exporter("dense"), dict.fromkeys(layers, DEFAULT)).scale_dtype
        == torch.bfloat16
    )
    with pytest.raises(FormatError, match=r"expected torch.bfloat16, seen torch.float32"):
        export(source, tmp_path / "out", layers, DEFAULT)
    halves = solve_all(source, DEFAULT, torch.bfloat16)
    model = load(export(source, tmp_path / "out", halves, DEFAULT))
    assert torch.equal(logits(model), logits(load(export(source, tmp_path / "d", halves, DEFAULT, "dense"))))


# --- the output directory ----------------------------------------------------------------------------------------


def test_shards_are_listed_exactly_and_copied_bit_for_bit(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source", max_shard_size="40KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    layers = solve_all(source, DEFAULT)
    calls: list[tuple[int, int, str]] = []
    flushed: list[int] = []

    def progress(*call: Any) -> None:
        calls.append(call)
        flushed.append(len(list(tmp_path.glob(".out.partial/shard-*"))))

    out = export(
        source,
        tmp_path / "out",
        layers,
        DEFAULT,
        max_shard_bytes=9_000,
        progress=progress,
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert flushed == sorted(flushed) and max(flushed) == len(files) - 1  # shards leave the memory on the way
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    found: dict[str, Tensor] = {}
    for file in files:
        tensors = load_file(out / file)
        assert all(index["weight_map"][key] == file for key in tensors)
        found.update(tensors)
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    originals = {
        key: value for path in source.glob("*.safetensors") for key, value in load_file(path).items()
    }
    copied = originals.keys() - layers.keys()
    assert "model.embed_tokens.weight" in copied and all(
        torch.equal(found[key], originals[key]) for key in copied
    )
    assert not layers.keys() & found.keys()
    assert [(done, total) for done, total, _ in calls] == [
        (i, len(originals)) for i in range(1, len(originals) + 1)
    ]
    whole = export(source, tmp_path / "whole", layers, DEFAULT)
    assert torch.equal(logits(load(out)), logits(load(whole)))
    assert sorted(path.name for path in whole.glob("model*")) == ["model.safetensors"]


def test_a_shard_never_exceeds_its_limit_unless_one_layer_does(
    tmp_path: Path, source: Path, layers: Solved
) -> None:
    out = export(source, tmp_path / "out", layers, DEFAULT, "dense", max_shard_bytes=9_000)
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 9_000


def test_auxiliary_files_are_copied_and_stale_ones_are_not(tmp_path: Path, layers: Solved) -> None:
    source = save_llama(tmp_path / "source")
    kept = {
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b'{"a": 1}',
        "tokenizer.model": bytes(range(256)),
        "chat_template.jinja": "{{ '\u00e9' }}".encode(),
        "generation_config.json": b'{"do_sample": false}',
        "preprocessor_config.json": b"{}",
        "modeling_custom.py": b"pass\n",
        "additional_chat_templates/tool.jinja": b"tool",
    }
    stale = [
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "model.safetensors.index.json",
        "original/consolidated.00.pth",
        "quantize_config.json",
        "onnx/model.onnx",
        ".cache/x.json",
        "other.gguf",
    ]
    for name, data in [*kept.items(), *((name, b"{}") for name in stale), ("README.md", b"old")]:
        (source / name).parent.mkdir(exist_ok=True, parents=True)
        (source / name).write_bytes(data)
    out = export(source, tmp_path / "out", layers, DEFAULT, card="# new\n")
    found = contents(out)
    assert found.keys() == {*kept, "config.json", "model.safetensors", "README.md"}
    assert {name: found[name] for name in kept} == kept
    assert found["README.md"] == b"# new\n"


def test_config_json_gains_exactly_the_quantization_block(
    tmp_path: Path, source: Path, layers: Solved
) -> None:
    before = json.loads((source / "config.json").read_text())
    after = json.loads((export(source, tmp_path / "out", layers, DEFAULT) / "config.json").read_text())
    block = after.pop("quantization_config")
    assert after == before
    assert block["ignore"] == ["lm_head"] and block["quant_method"] == "compressed-tensors"
    weights = block["config_groups"]["group_0"]["weights"]
    assert weights == {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
    }
    dense = export(source, tmp_path / "dense", layers, DEFAULT, "dense")
    assert (dense / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("name", ["compressed_tensors", "dense"])
@pytest.mark.parametrize("scheme", [DEFAULT, Scheme(3, -1, False), Scheme(5, 8, True)])
def test_the_plan_knows_the_size_of_the_tensors(
    tmp_path: Path, source: Path, name: str, scheme: Scheme
) -> None:
    layers = solve_all(source, scheme)
    expected = plan_export(source, get_exporter(name), dict.fromkeys(layers, scheme))
    out = export(source, tmp_path / "out", layers, scheme, name)
    stored = load_file(out / "model.safetensors")
    copied = load_file(source / "model.safetensors").keys() - layers.keys()
    quantized = sum(tensor.nbytes for key, tensor in stored.items() if key not in copied)
    auxiliary = (source / "generation_config.json").stat().st_size
    assert expected.quantized_bytes == quantized
    assert expected.total_bytes == sum(tensor.nbytes for tensor in stored.values()) + auxiliary
    assert expected.quantized_weights == sum(layer().codes.numel() for layer in layers.values())
    assert expected.bits_per_weight == 8 * quantized / expected.quantized_weights


def test_the_bytes_are_the_same_every_time(tmp_path: Path, source: Path, layers: Solved) -> None:
    backwards = dict(reversed(layers.items()))
    first = export(source, tmp_path / "first", layers, DEFAULT, max_shard_bytes=20_000)
    second = export(source, tmp_path / "second", backwards, DEFAULT, max_shard_bytes=20_000)
    assert contents(first) == contents(second)


def test_a_directory_that_is_not_empty_is_refused_and_untouched(
    tmp_path: Path, source: Path, layers: Solved
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    for overwrite in (False, True):  # it is no checkpoint, so that even overwrite does not replace it
        with pytest.raises(OutputExistsError):
            export(source, out, layers, DEFAULT, overwrite=overwrite)
        assert contents(tmp_path) == {"out/precious.txt": b"mine"}


def test_overwrite_replaces_a_checkpoint_whole(tmp_path: Path, source: Path, layers: Solved) -> None:
    out = export(source, tmp_path / "out", layers, DEFAULT, max_shard_bytes=9_000)
    with pytest.raises(OutputExistsError, match="not empty"):
        export(source, out, layers, DEFAULT)
    export(source, out, layers, DEFAULT, overwrite=True)
    fresh = export(source, tmp_path / "fresh", layers, DEFAULT)
    assert contents(out) == contents(fresh)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out"]


def test_an_empty_directory_may_be_the_output(tmp_path: Path, source: Path, layers: Solved) -> None:
    (tmp_path / "out").mkdir()
    assert (export(source, tmp_path / "out", layers, DEFAULT) / "config.json").is_file()


def test_the_source_is_never_the_output(tmp_path: Path, layers: Solved) -> None:
    source = save_llama(tmp_path / "a" / "source")
    before = contents(tmp_path)
    for out in (source, source / "inside", tmp_path / "a"):
        with pytest.raises(OutputExistsError, match="contain each other"):
            export(source, out, layers, DEFAULT, overwrite=True)
    assert contents(tmp_path) == before


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused_and_nothing_stays(
    tmp_path: Path, source: Path, layers: Solved, bad: float
) -> None:
    key = "model.layers.1.mlp.up_proj.weight"
    layer = layers[key]()
    layer.scale[3, 0] = bad
    for name in ("compressed_tensors", "dense"):
        with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.up_proj: scale: 1 of"):
            export(source, tmp_path / "out", {**layers, key: lambda: layer}, DEFAULT, name)
        assert list(tmp_path.iterdir()) == []


def test_a_product_that_overflows_is_refused(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source", dtype=torch.float16)
    layers = solve_all(source, DEFAULT, torch.float16)
    key = "model.layers.0.mlp.up_proj.weight"
    layer = layers[key]()
    layer.scale[0, 0] = 60000.0  # finite in float16, but not when multiplied by a code
    with pytest.raises(NonFiniteError, match="codes - zero"):
        export(source, tmp_path / "out", {**layers, key: lambda: layer}, DEFAULT)


def test_a_source_tensor_that_is_not_finite_is_refused(tmp_path: Path, layers: Solved) -> None:
    source = save_llama(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][5] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"model\.norm\.weight: 1 of 32 values"):
        export(source, tmp_path / "out", layers, DEFAULT)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["layer", "card", "rename"])
def test_a_crash_leaves_nothing_behind(
    tmp_path: Path, source: Path, layers: Solved, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any) -> SolvedLayer:
        raise KeyboardInterrupt

    broken = dict(layers)
    if where == "layer":
        broken["model.layers.1.mlp.up_proj.weight"] = crash
    else:
        monkeypatch.setattr(writer, {"card": "_copy_auxiliary", "rename": "_move"}[where], crash)
    with pytest.raises(KeyboardInterrupt):
        export(source, tmp_path / "out", broken, DEFAULT, max_shard_bytes=9_000)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_overwrite_keeps_the_old_checkpoint(tmp_path: Path, source: Path, layers: Solved) -> None:
    out = export(source, tmp_path / "out", layers, DEFAULT)
    before = contents(tmp_path)
    layer = layers["model.layers.0.mlp.up_proj.weight"]()
    layer.scale[0, 0] = float("nan")
    with pytest.raises(NonFiniteError):
        export(source, out, {layer.spec.tensor_key: lambda: layer}, DEFAULT, overwrite=True)
    assert contents(tmp_path) == before


def test_the_disk_is_checked_first(
    tmp_path: Path, source: Path, layers: Solved, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    watched: Solved = {key: (lambda key=key: (called.append(key), layers[key]())[1]) for key in layers}
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DiskSpaceError, match="only 0.000 GB are free"):
        export(source, tmp_path / "out", watched, DEFAULT)
    assert called == [] and list(tmp_path.iterdir()) == []


def test_check_lists_every_layer_that_does_not_fit() -> None:
    specs = [
        LinearSpec(f"block.{i}", f"block.{i}.weight", 0, 8, size) for i, size in enumerate((96, 64, 80, 31))
    ]
    for name in ("compressed_tensors", "dense"):
        with pytest.raises(FormatError, match="group_size") as caught:
            get_exporter(name).check({Scheme(4, 48, True): specs})
        text = str(caught.value)
        assert (
            "block.0" not in text and all(f"block.{i} (8 x " in text for i in (1, 2, 3)) and "choose" in text
        )
        get_exporter(name).check({Scheme(4, -1, True): specs})
    for scheme, word in (
        (Scheme(9, 32, True), "bits = 9"),
        (Scheme(1, 32, True), "bits = 1"),
        (Scheme(4, 0, True), "-1"),
    ):
        with pytest.raises(FormatError, match=word):
            get_exporter("compressed_tensors").check({scheme: specs[:1]})


def change_codes(layer: SolvedLayer) -> SolvedLayer:
    layer.codes[0, 0] = 8
    return layer


def change_zero(layer: SolvedLayer) -> SolvedLayer:
    layer.zero[0, 0] = 1
    return layer


WRONG: list[tuple[Callable[[SolvedLayer], SolvedLayer], str]] = [
    (change_codes, r"codes: expected -8 to 7, seen -8 to 8"),
    (change_zero, r"zero: expected 0 to 0, seen 0 to 1"),
    (lambda layer: replace(layer, scheme=Scheme(4, 16, True)), "scheme"),
    (lambda layer: replace(layer, codes=layer.codes[:-1]), "codes' shape"),
    (lambda layer: replace(layer, scale=layer.scale.half()), "scale's dtype"),
    (lambda layer: replace(layer, scale=layer.scale[:, :0]), "scale's shape"),
    (lambda layer: replace(layer, spec=replace(layer.spec, tensor_key="other.weight")), "tensor: expected"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_layer_that_breaks_the_contract_is_refused(
    tmp_path: Path, source: Path, change: Callable[[SolvedLayer], SolvedLayer], message: str, layers: Solved
) -> None:
    key = "model.layers.0.self_attn.q_proj.weight"
    wrong = change(layers[key]())
    with pytest.raises(FormatError, match=message) as caught:
        export(source, tmp_path / "out", {**layers, key: lambda: wrong}, DEFAULT)
    assert "model.layers.0.self_attn.q_proj" in str(caught.value) and list(tmp_path.iterdir()) == []


def test_changed_and_added_tensors_and_config_entries_are_written(
    tmp_path: Path, source: Path, layers: Solved
) -> None:
    """All else is as without changes, and the plan knows what is added."""
    before = load_file(source / "model.safetensors")
    new = {"model.norm.weight": torch.full((32,), 3.0), "extra.weight": torch.ones(5, 7)}
    changes = Changes(new, {"tie_word_embeddings": False, "seen": 1})
    out, plain = export(source, tmp_path / "out", layers, DEFAULT, changes=changes), tmp_path / "plain"
    export(source, plain, layers, DEFAULT)
    tensors, others = (load_file(path / "model.safetensors") for path in (out, plain))
    assert tensors.keys() == {*others, "extra.weight"}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, new.get(name, others.get(name, tensor))), name
    config, other = (json.loads((path / "config.json").read_text()) for path in (out, plain))
    assert config == {**other, **changes.config}
    planned = [
        plan_export(source, get_exporter("dense"), dict.fromkeys(layers, DEFAULT), of)
        for of in (changes, None)
    ]
    assert planned[0].total_bytes - planned[1].total_bytes == 5 * 7 * 4
    assert planned[0].n_tensors == planned[1].n_tensors + 1 == len(before) + 1


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.norm.weight", torch.ones(31)),
        ("model.norm.weight", torch.ones(32, dtype=torch.bfloat16)),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(64, 32)),
    ],
)
def test_changes_that_do_not_fit_are_refused(
    tmp_path: Path, source: Path, layers: Solved, name: str, tensor: Tensor
) -> None:
    layers = {key: of for key, of in layers.items() if "layers.0.mlp.up" in key}
    with pytest.raises(FormatError, match=rf"cannot put .* in place of {name}"):
        export(source, tmp_path / "out", layers, DEFAULT, changes=Changes({name: tensor}))
    assert list(tmp_path.iterdir()) == []


def test_sources_that_cannot_be_read_are_refused_with_advice(tmp_path: Path, layers: Solved) -> None:
    source = save_llama(tmp_path / "source")
    out = tmp_path / "out"
    with pytest.raises(FormatError, match=r"no tensors of these names: model\.nowhere\.weight"):
        export(
            source,
            out,
            {**layers, "model.nowhere.weight": layers["model.layers.0.mlp.up_proj.weight"]},
            DEFAULT,
        )
    with pytest.raises(FormatError, match="no layer to export"):
        export(source, out, {}, DEFAULT)
    with pytest.raises(FormatError, match="two-dimensional"):
        export(source, out, {"model.norm.weight": layers["model.layers.0.mlp.up_proj.weight"]}, DEFAULT)
    with pytest.raises(ConfigError, match="model.layers.0.mlp.up_proj"):
        export(source, out, layers, DEFAULT, ignore=["model.layers.0.mlp.up_proj"])
    packed = export(source, tmp_path / "packed", layers, DEFAULT)
    with pytest.raises(FormatError, match="quantized already .compressed-tensors."):
        export(packed, out, layers, DEFAULT)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"seen pytorch_model\.bin; .*save_pretrained"):
        export(source, out, layers, DEFAULT)
    (source / "config.json").unlink()
    with pytest.raises(FormatError, match="no config.json"):
        export(source, out, layers, DEFAULT)
    assert not out.exists()


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path, layers: Solved) -> None:
    source = save_llama(tmp_path / "source", max_shard_size="40KB")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    wrong = {**index["weight_map"], "model.ghost.weight": index["weight_map"]["model.norm.weight"]}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(FormatError, match="model.ghost.weight"):
        export(source, tmp_path / "out", layers, DEFAULT)
    (source / index["weight_map"]["model.norm.weight"]).unlink()
    with pytest.raises(FormatError, match="missing: model-0"):
        export(source, tmp_path / "out", layers, DEFAULT)


def test_stored_weights_refuses_a_packed_layer_with_a_missing_tensor(
    tmp_path: Path, source: Path, layers: Solved
) -> None:
    out = export(source, tmp_path / "out", layers, DEFAULT)
    tensors = load_file(out / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(FormatError, match=r"model\.layers\.0\.mlp\.up_proj"):
        list(stored_weights(out))


# --- discovery and the card --------------------------------------------------------------------------------------


def test_formats_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exporters.exporter_names() == ["compressed_tensors", "dense"]
    assert get_exporter("compressed-tensors") is get_exporter("compressed_tensors")
    with pytest.raises(ConfigError, match="'writer': expected one of compressed_tensors, dense"):
        get_exporter("writer")
    point = EntryPoint("else-where", "bakron.exporters.dense:EXPORTER", exporters.ENTRY_POINT_GROUP)
    monkeypatch.setattr(exporters, "entry_points", lambda group: [point] if group == point.group else [])
    assert get_exporter("else_where") is get_exporter("dense")
    with pytest.raises(ConfigError, match="compressed_tensors, dense, else-where"):
        get_exporter("unknown")


@pytest.mark.parametrize("name", exporters.exporter_names())
def test_every_format_has_its_file_name_and_says_how_to_load_it(name: str) -> None:
    exporter = get_exporter(name)
    assert exporter.name == name
    compile(exporter.usage([DEFAULT]), "usage", "exec")


def test_the_card_shows_every_fact_and_says_what_is_missing() -> None:
    facts = {
        "title": "tiny-4bit",
        "base_model": "org/tiny",
        "method": "two-sided | sweep",
        "format": "compressed_tensors",
        "bits": 4,
        "group_size": -1,
        "symmetric": True,
        "transform": "fold+rotate",
        "bits_per_weight": 4.125,
        "share_quantized": 0.875,
        "calibration": {
            "source": "text.txt",
            "n_sequences": 128,
            "sequence_length": 2048,
            "fingerprint": "abc123",
        },
        "quality": {"perplexity_before": 5.25, "perplexity_after": 5.5, "kl": 0.0125, "top1": 0.96},
        "usage": "import bakron",
        "version": "0.1.0",
        "settings": {"seed": 7},
    }
    card = model_card(facts)
    assert card.startswith('---\nbase_model: "org/tiny"\n')
    for part in (
        "# tiny-4bit",
        "two-sided \\| sweep",
        "fold+rotate",
        "whole row",
        "symmetric",
        "4.125",
        "0.875",
        "text.txt",
        "128",
    ):
        assert part in card
    for part in (
        "2048",
        "abc123",
        "5.25",
        "5.5",
        "0.0125",
        "0.96",
        "```python\nimport bakron",
        "bakron 0.1.0",
        '"seed": 7',
    ):
        assert part in card
    assert card.count("not measured") == 2  # the evaluation text and the 99th percentile
    assert model_card(facts) == card and "not measured" in model_card({})


def test_safetensors_files_say_that_they_come_from_torch(
    tmp_path: Path, source: Path, layers: Solved
) -> None:
    """Older transformers refuse a file without this metadata."""
    with safe_open(export(source, tmp_path / "out", layers, DEFAULT) / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
