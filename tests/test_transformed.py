"""Claims about runs on transformed models: what is stored is what was solved and measured, and the original is the measure.

1. End to end: for every family, what transformers loads is the transformed model with the solved weights.
2. Untied heads are written, said and loaded, whatever the checkpoint's prefixes are.
3. Quality is against the model as it came; comparisons may mix transforms.
4. Work made with another transform is refused by name; the same call gives the same bytes, in stages or resumed.
5. A transformed model can be written by itself.

Kinds: oracle (transformers' own loader and forward), regression, behaviour.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_run import BASE, Listener, assert_identical, words
from tiny_models import FAMILIES, tiny_decoder
from transformers import AutoModelForCausalLM

from bakron.errors import ConfigError, ModelError, ResumeError, VerificationError
from bakron.models import load_decoder, transform
from bakron.run import stages
from bakron.run.compare import compare
from bakron.run.measure import measure
from bakron.run.pipeline import Job, quantize
from bakron.run.settings import Settings
from bakron.run.transformed import write_transformed
from bakron.run.variants import make_variants
from bakron.run.verify import verify

ALL = "rotate+heads+rescale"
EXACT = {"gemma2": "fold+heads+rescale", "gemma3": "fold+heads+rescale", "gpt2": "rotate+heads"}
RTN: dict[str, Any] = {"method": "rtn", "bits": 8, "group_size": 16}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tied bfloat16 model ``m`` and texts."""
    path = tmp_path_factory.mktemp("home")
    tiny_decoder("llama", path / "m", tied=True, tokenizer=True, dtype=torch.bfloat16)
    (path / "text.txt").write_text(words(60, 0))
    (path / "held.txt").write_text(words(3000, 1))
    return path


def logits_of(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(30)[None] + 2).logits[0]


# 1. End to end


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_loads_is_the_transformed_model(tmp_path: Path, family: str) -> None:
    source = tiny_decoder(family, tmp_path / "m", dtype=torch.bfloat16)
    settings = {**RTN, "transform": EXACT.get(family, ALL), "format": "dense" if family == "gpt2" else None}
    quantize(source, tmp_path / "out", **settings)
    checked = verify(tmp_path / "out")
    job = Job(str(source), Settings.load(**settings), tmp_path / "work")
    job.solve()
    matrices = len(job.flat_targets) + (0 if family in ("gemma2", "gemma3") else 3 if family == "gpt2" else 2)
    assert checked["layers"] == checked["equal"] == matrices  # embeddings and head, where they were rotated
    loaded = load_decoder(tmp_path / "out")
    for name, parameter in job.decoder.model.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), parameter.bfloat16().float()), name
    ids = torch.arange(30) + 2
    torch.testing.assert_close(loaded.logits(ids), job.decoder.logits(ids))
    original = load_decoder(source).logits(ids)
    assert float((loaded.logits(ids) - original).norm() / original.norm()) < 0.1


def test_linears_that_are_skipped_are_transformed_too(home: Path, tmp_path: Path) -> None:
    settings = {**RTN, "transform": ALL, "skip": ["q_proj$", "down_proj$"], "format": "dense"}
    quantize(home / "m", tmp_path / "out", **settings)
    verify(tmp_path / "out")
    near, original = logits_of(tmp_path / "out"), logits_of(home / "m")
    assert float((near - original).norm() / original.norm()) < 0.1
    job = Job(str(home / "m"), Settings.load(**settings), tmp_path / "work")
    job.solve()
    stored = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(stored.float(), job.decoder.get_weight("model.layers.1.mlp.down_proj"))


# 2. Heads


def test_an_untied_head_is_written_and_said(home: Path, tmp_path: Path) -> None:
    seen = Listener()
    record = quantize(home / "m", tmp_path / "out", progress=seen, **RTN, transform="rotate")
    assert any("lm_head.weight adds 0.0 MB" in note for note in seen.notes)
    assert record["transform"] == "fold+rotate"
    assert "| fold+rotate |" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert bool((tensors["model.norm.weight"] == 1).all())
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    tied = quantize(home / "m", tmp_path / "tied", **RTN, transform="fold")
    assert "lm_head" not in tied["sha256"]
    assert (tmp_path / "tied" / "config.json").read_text().count('"tie_word_embeddings": true') == 1


def test_a_checkpoint_without_the_models_prefix_loads_again(tmp_path: Path) -> None:
    source = tiny_decoder("gpt2", tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    bare = {key.removeprefix("transformer."): value for key, value in tensors.items()}
    save_file(bare, source / "model.safetensors", metadata={"format": "pt"})
    quantize(source, tmp_path / "out", **RTN, transform="rotate", format="dense")
    verify(tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {*bare, "lm_head.weight"}


def test_a_head_that_is_tied_again_is_noticed(home: Path, tmp_path: Path) -> None:
    quantize(home / "m", tmp_path / "out", **RTN, transform="rotate", format="dense")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(VerificationError, match="lm_head"):
        verify(tmp_path / "out")


# 3. Quality


def test_quality_is_against_the_model_as_it_came(home: Path, tmp_path: Path) -> None:
    record = quantize(
        home / "m", tmp_path / "out", evaluation=home / "held.txt", transform=ALL, **{**RTN, "bits": 3}
    )
    measured = measure(tmp_path / "out", home / "held.txt", reference=home / "m")
    assert record["quality"]["kl"] == pytest.approx(measured["kl"], rel=1e-4) and measured["kl"] > 1e-3
    assert record["quality"]["perplexity_before"] == pytest.approx(measured["perplexity_reference"], rel=1e-6)


def test_a_comparison_may_mix_transforms(home: Path, tmp_path: Path) -> None:
    data = {"calibration": str(home / "text.txt"), "n_sequences": 3, "sequence_length": 20, "group_size": 16}
    methods = [f"bakron:transform={ALL}", "rtn", "rtn:transform=rotate", "bakron"]
    rows = compare(
        home / "m", make_variants(methods, [4], **data), home / "held.txt", tmp_path / "work", n_sequences=4
    )
    alone = compare(
        home / "m",
        make_variants(methods[3:], [4], **data),
        home / "held.txt",
        tmp_path / "alone",
        n_sequences=4,
    )
    assert rows[0] == alone[0]
    assert rows[-1]["kl"] == alone[-1]["kl"]
    assert len({row["kl"] for row in rows[1:]}) == 4


# 4. Work


def test_stages_and_repetitions_give_the_same_bytes(home: Path, tmp_path: Path) -> None:
    settings = {**BASE, "calibration": home / "text.txt", "transform": ALL}
    for name in ("a", "b"):
        quantize(home / "m", tmp_path / name, **settings)
    assert_identical(tmp_path / "b", tmp_path / "a")
    stages.collect(home / "m", tmp_path / "work", **{**settings, "calibration": str(home / "text.txt")})
    stages.solve(tmp_path / "work")
    stages.export(tmp_path / "work", tmp_path / "c")
    assert_identical(tmp_path / "c", tmp_path / "a")


def test_work_and_factors_of_another_transform_are_refused(home: Path, tmp_path: Path) -> None:
    settings = {**BASE, "calibration": str(home / "text.txt"), "inputs": "static"}
    stages.collect(home / "m", tmp_path / "work", transform="rotate", **settings)
    with pytest.raises(ResumeError, match=r"after fold\+rotate.* now model = '[0-9a-f]+'\."):
        stages.collect(home / "m", tmp_path / "work", **settings)
    with pytest.raises(ResumeError, match=r"after fold\+rotate.* after fold\+rotate\+heads"):
        stages.collect(home / "m", tmp_path / "work", transform="heads+rotate", **settings)
    del settings["calibration"]
    given = {**settings, "hessians": tmp_path / "work"}
    with pytest.raises(ConfigError, match=r"fingerprint [0-9a-f]+ after fold\+rotate, and this one's"):
        quantize(home / "m", tmp_path / "out", **given)
    quantize(home / "m", tmp_path / "out", transform="rotate", **given)


def test_what_is_not_exact_is_refused_before_work(tmp_path: Path) -> None:
    source = tiny_decoder("gemma2", tmp_path / "m")
    with pytest.raises(ModelError, match=r"transform rotate: model\.layers\.0 "):
        quantize(source, tmp_path / "out", transform="rotate", **RTN)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.work").exists()


def test_the_setting_is_read_in_any_order() -> None:
    read = lambda text: Settings.load(transform=text).transforms  # noqa: E731
    assert read("none") == ()
    assert read("rescale+rotate") == ("fold", "rotate", "rescale")
    assert read("heads+fold+heads") == ("fold", "heads")
    for wrong in ("", "rotation", "none+fold", "fold,rotate"):
        with pytest.raises(ConfigError, match="transform: .* is not one of fold, rotate, heads, rescale"):
            Settings.load(transform=wrong)


# 5. Dense copies


def test_a_transformed_model_can_be_written_by_itself(home: Path, tmp_path: Path) -> None:
    record = write_transformed(home / "m", tmp_path / "out", ("rotate", "heads"))
    assert verify(tmp_path / "out")["equal"] == len(record["sha256"]) == 2 * 7 + 2
    copy, original = logits_of(tmp_path / "out"), logits_of(home / "m")
    assert 0 < float((copy - original).norm() / original.norm()) < 0.02  # bfloat16
    decoder = transform(load_decoder(home / "m"), ["rotate", "heads"])
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, decoder.model.get_parameter(name).bfloat16()), name
    with pytest.raises(ConfigError, match="expected at least one"):
        write_transformed(home / "m", tmp_path / "none", ())
