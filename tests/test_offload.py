"""Claims about offload: one block at a time is in memory, and nothing but that differs from having all of them there.

Kinds: oracle (the same decoder or run without offload), behaviour.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models import compress, make_ids
from test_run import BASE, Death, Listener, assert_identical, words
from tiny_models import tiny_decoder
from torch import nn

import bakron.models.memory
import bakron.run.plan
from bakron.errors import MemorySpaceError, MissingExtraError, ModelError, NonFiniteError
from bakron.models import Decoder, check_views, load_decoder
from bakron.models.memory import parameter_bytes
from bakron.run.measure import measure
from bakron.run.pipeline import Job, quantize
from bakron.run.settings import Settings

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tied": True},
    "gpt2": {},
    "gemma2": {"dtype": torch.bfloat16, "num_hidden_layers": 2},
    "phi3": {"max_shard_size": "20KB"},
}


def model_of(path: Path, family: str, **options: Any) -> Path:
    return tiny_decoder(family, path / family, tokenizer=True, **{"num_hidden_layers": 4, **options})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tied llama in bfloat16 and a text."""
    path = tmp_path_factory.mktemp("home")
    model_of(path, "llama", tied=True, dtype=torch.bfloat16)
    (path / "text.txt").write_text(words(60, 0))
    return path


def full_blocks(decoder: Decoder) -> list[int]:
    return [b for b, block in enumerate(decoder.blocks) if not next(block.parameters()).is_meta]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_that_a_decoder_computes_is_the_same(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    path = model_of(tmp_path, family, **FAMILIES[family])
    whole, one = load_decoder(path, dtype=dtype), load_decoder(path, dtype=dtype, offload="disk")
    for fact in ("linears", "groups", "fused", "other_linears", "tied", "device", "dtype", "max_length"):
        assert getattr(one, fact) == getattr(whole, fact)
    buffers = dict(one.model.named_buffers())
    for name, buffer in whole.model.named_buffers():
        assert torch.equal(buffers[name], buffer) and buffers[name].dtype == buffer.dtype
    ids = [make_ids(9), make_ids(20)]
    one.check_replay(ids[1])
    states = one.hidden_states(ids)
    assert all(map(torch.equal, states, whole.hidden_states(ids)))
    assert torch.equal(one.tail(states[0]), whole.tail(states[0]))
    seen: list[dict[str, torch.Tensor]] = []
    for decoder in (whole, one):
        terms: dict[str, torch.Tensor] = {}
        h = decoder.embed(ids[0])
        g = decoder.backward_block(
            1, h, torch.ones_like(h), lambda name, x, g, t=terms: t.update({name: g.T @ x})
        )
        seen.append({**terms, "": g})
    assert seen[0].keys() == seen[1].keys() and all(torch.equal(seen[0][k], seen[1][k]) for k in seen[0])
    for b, specs in enumerate(whole.linears):
        for writer, expected in zip(one.writers(b), whole.writers(b), strict=True):
            assert writer.name == expected.name
            assert torch.equal(writer.added(h), expected.added(h))
        assert all(torch.equal(one.get_weight(s.name), whole.get_weight(s.name)) for s in specs)
        assert full_blocks(one) == [b]
    assert not any(p.requires_grad for p in one.model.parameters())


def test_a_compressed_checkpoint_is_offloaded_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bakron.models.decompress.SHARD_BYTES", 10_000)
    path = tiny_decoder("llama", tmp_path / "model", tied=True, dtype=torch.bfloat16)
    compress(path, {"group_0": (["Linear"], 4)}, lambda _: 4, symmetric=False)
    whole, one = load_decoder(path), load_decoder(path, offload="disk")
    assert one.offloaded is not None
    folder = Path(one.offloaded.kept.name)
    assert len(list(folder.glob("*.safetensors"))) > 1
    for spec in (spec for specs in whole.linears for spec in specs):
        assert torch.equal(one.get_weight(spec.name), whole.get_weight(spec.name))
    one.offloaded.kept.cleanup()


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("llama", {"estimator": "token", "inputs": "static"}), ("gpt2", {}), ("llama", {"method": "rtn"})],
)  # fmt: skip
def test_a_run_gives_the_same_bytes(
    home: Path, tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    model = model_of(tmp_path, family, tied=True)
    options = {**BASE, **settings, "calibration": home / "text.txt"}
    quantize(model, tmp_path / "whole", **options)
    quantize(model, tmp_path / "one", offload="disk", **options)
    assert_identical(tmp_path / "one", tmp_path / "whole")


def test_quality_before_and_after_is_the_same(tmp_path: Path) -> None:
    model = tiny_decoder("llama", tmp_path / "llama", tokenizer=True, max_position_embeddings=16)
    (tmp_path / "text.txt").write_text(words(80, 0))
    options = {**BASE, "method": "rtn", "evaluation": tmp_path / "text.txt"}
    record = quantize(model, tmp_path / "whole", **options)
    quantize(model, tmp_path / "one", offload="disk", **options)
    assert_identical(tmp_path / "one", tmp_path / "whole")
    assert record["quality"]["kl"] > 0 and record["quality"]["n_tokens"] == 24 * 15


def test_a_run_may_die_anywhere_and_go_on_with_another_offload(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**BASE, "calibration": home / "text.txt"}
    quantize(home / "llama", tmp_path / "expected", **options)
    publish, deaths, published = os.replace, 0, 0

    def replace(source: Any, target: Any) -> None:
        nonlocal published
        publish(source, target)
        published += 1
        if published == 2:
            raise Death

    monkeypatch.setattr("os.replace", replace)
    for _ in range(40):
        published = 0
        try:
            quantize(home / "llama", tmp_path / "out", offload=("disk", "none")[deaths % 2], **options)
            break
        except Death:
            deaths += 1
    assert deaths > 8
    assert_identical(tmp_path / "out", tmp_path / "expected")


def test_one_block_is_in_memory_whatever_is_done(home: Path, tmp_path: Path) -> None:
    """At every call of any module; and at every step no parameter of another block is held by anything."""
    settings = Settings.load(None, calibration=str(home / "text.txt"), offload="disk", **BASE)
    job = Job(str(home / "llama"), settings, tmp_path / "work")
    known = {id(item) for item in parameters_in_memory()}
    block = parameter_bytes(job.decoder.blocks[0])
    most_full = most_bytes = 0

    def count(*_: Any) -> None:
        nonlocal most_full
        most_full = max(most_full, len(full_blocks(job.decoder)))

    def measure_bytes(_count: int) -> None:
        nonlocal most_bytes
        held = [p for p in parameters_in_memory() if id(p) not in known]
        most_bytes = max(most_bytes, sum(p.nbytes for p in held))

    job.progress = Listener(measure_bytes)
    handle = nn.modules.module.register_module_forward_pre_hook(count)
    try:
        plan = job.plan()
        job.collect()
        job.solve()
        job.decoder.hidden_states(job.sequences)
        check_views(job.decoder, ["mlp", "attention"])
    finally:
        handle.remove()
    assert most_full == 1 and 0 < most_bytes <= block
    assert plan.model == plan.model_one_block == plan.model_whole - 3 * block
    assert plan.memory == load_plan(home, tmp_path).memory - 3 * block


def load_plan(home: Path, tmp_path: Path) -> bakron.run.plan.Plan:
    settings = Settings.load(None, calibration=str(home / "text.txt"), **BASE)
    return Job(str(home / "llama"), settings, tmp_path / "whole").plan()


def parameters_in_memory() -> list[nn.Parameter]:
    return [item for item in gc.get_objects() if type(item) is nn.Parameter and not item.is_meta]


def test_replaced_weights_last_and_set_ones_go_with_the_block(home: Path) -> None:
    decoder = load_decoder(home / "llama", offload="disk")
    name, other = decoder.linears[1][0].name, decoder.linears[2][0].name
    original = decoder.get_weight(name)
    decoder.set_weight(name, original + 1)
    assert torch.equal(decoder.get_weight(name), original + 1)
    decoder.get_weight(other)
    assert torch.equal(decoder.get_weight(name), original)
    decoder.replace_weights(1, lambda: [(name, original + 2)])
    for _ in range(2):
        assert torch.equal(decoder.get_weight(name), original + 2)
        decoder.get_weight(other)
    decoder.replace_weights(1, lambda: [(name, original * torch.nan)])
    for _ in range(2):
        with pytest.raises(NonFiniteError, match=name):
            decoder.get_weight(name)
        assert full_blocks(decoder) == []


def test_quality_is_measured_the_same(home: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(words(400, 1))
    options = {"reference": home / "llama", "n_sequences": 2, "sequence_length": 40}
    whole, one = (
        measure(home / "llama", tmp_path / "text.txt", **options, offload=offload)
        for offload in ("none", "disk")
    )
    assert whole == one and one["kl"] == 0


def test_nan_weights_are_named_before_work(home: Path, tmp_path: Path) -> None:
    for key in ("model.layers.2.mlp.up_proj.weight", "model.norm.weight"):
        model = model_of(tmp_path / key, "llama")
        tensors = load_file(model / "model.safetensors")
        tensors[key].view(-1)[5] = float("nan")
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
        with pytest.raises(NonFiniteError, match=key.replace(".", r"\.")):
            quantize(model, tmp_path / "out", calibration=home / "text.txt", offload="disk", **BASE)
        assert not (tmp_path / "out.work").exists()


def test_fused_experts_are_refused_by_name(tmp_path: Path) -> None:
    path = tiny_decoder("mixtral", tmp_path / "mixtral")
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.experts"):
        load_decoder(path, offload="disk")


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = parameter_bytes(load_decoder(home / "llama").model)
    monkeypatch.setattr(bakron.models.memory, "free_memory", lambda device: needed - 1)
    with pytest.raises(MemorySpaceError, match="offload disk"):
        load_decoder(home / "llama")
    load_decoder(home / "llama", dtype=torch.bfloat16)
    load_decoder(home / "llama", offload="disk")


def test_a_run_that_may_not_fit_says_what_helps(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bakron.run.plan, "free_memory", lambda device: 1000)
    for offload, said in (("none", "or offload disk"), ("disk", "fewer or shorter")):
        listener = Listener()
        settings = Settings.load(None, calibration=str(home / "text.txt"), offload=offload, **BASE)
        Job(str(home / "llama"), settings, tmp_path / "work", listener).plan()
        assert any("0.00 GB are free" in note and said in note for note in listener.notes)


def test_offload_without_accelerate_names_the_extra(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bakron.models.offload", raising=False)
    monkeypatch.setitem(sys.modules, "accelerate.hooks", None)
    with pytest.raises(MissingExtraError, match=r"bakron\[offload\]"):
        load_decoder(home / "llama", offload="disk")
