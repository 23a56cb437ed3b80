"""Claims: tuned scales bring the model closer to the original, the codes stay, what is stored is what was tuned, and a
killed run ends with the bytes of one that was not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TINY_VOCAB, tiny_decoder

from bakron.core.layers import LinearSpec, Scheme, SolvedLayer
from bakron.errors import ConfigError, ResumeError
from bakron.run import stages
from bakron.run import tune as tuning
from bakron.run.pipeline import Job, quantize
from bakron.run.progress import Silent
from bakron.run.settings import Settings
from bakron.run.tune import _Scale, _Wanted, tuned

N = 12
GRID: dict[str, Any] = {"bits": 2, "group_size": 16, "symmetric": False, "inputs": "static", "method": "gptq"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models, and token ids."""
    path = tmp_path_factory.mktemp("home")
    for family in ("llama", "gpt2", "gemma3"):
        tiny_decoder(family, path / family, tokenizer=True)
    ids = torch.randint(2, TINY_VOCAB, (N, 24), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, path / "ids.safetensors")
    return path


def job_of(home: Path, work: Path, family: str = "llama", **changes: Any) -> Job:
    """A job that is not begun."""
    data = {"calibration": str(home / "ids.safetensors"), "n_sequences": N, "sequence_length": 24}
    return Job(str(home / family), Settings.load(None, **{**GRID, **data, **changes}), work)


def solved_job(home: Path, work: Path, family: str = "llama", **changes: Any) -> Job:
    job = job_of(home, work, family, **changes)
    job.collect()
    job.solve()
    return job


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_tuned_scales_lower_the_divergence_and_codes_stay(home: Path, tmp_path: Path, family: str) -> None:
    plain = solved_job(home, tmp_path / "plain", family, format="dense")
    job = solved_job(home, tmp_path / "tuned", family, format="dense", tune=2)
    before, after = job.solved.metadata(tuned(2, 0))["kl"]
    assert after < before
    divergence = [_Wanted(j.decoder, j.sequences, j.collected).divergence() for j in (plain, job)]
    assert divergence == [pytest.approx(before, rel=1e-6), pytest.approx(after, rel=1e-6)]
    moved = 0
    for b in range(job.decoder.n_blocks):
        for name, layer in job._layers(b).items():
            first = plain._layers(b)[name]
            assert torch.equal(layer.codes, first.codes) and torch.equal(layer.zero, first.zero)
            assert layer.scale.dtype == first.scale.dtype
            assert bool((layer.scale.float() * first.scale.float() > 0).all())
            assert torch.equal(job.decoder.get_weight(name), layer.weight(job.decoder.dtype).float())
            moved += int((layer.scale != first.scale).sum())
    assert moved


@pytest.mark.parametrize("group_size", [16, 10, -1])
def test_the_gradient_in_the_scales_is_autograds(group_size: int) -> None:
    """Also with a last short group."""
    generator = torch.Generator().manual_seed(1)
    m, n, t = 6, 24, 30
    n_groups = 1 if group_size == -1 else -(-n // group_size)
    layer = SolvedLayer(
        LinearSpec("l", "l.weight", 0, m, n),
        Scheme(3, group_size, False),
        torch.randint(-4, 4, (m, n), generator=generator, dtype=torch.int8),
        torch.rand(m, n_groups, generator=generator) + 0.5,
        torch.randint(-4, 4, (m, n_groups), generator=generator, dtype=torch.int32),
    )
    x, g = torch.randn(t, n, generator=generator), torch.randn(t, m, generator=generator)
    change = torch.zeros(m, n_groups, requires_grad=True)
    moved = dataclasses.replace(layer, scale=layer.scale * (1 + change))
    (x @ moved.weight().T * g).sum().backward()
    scale = _Scale.of(layer, torch.device("cpu"))
    scale.see(x[:10], g[:10])
    scale.see(x[10:], g[10:])
    assert scale.gradient is not None and change.grad is not None
    assert torch.allclose(scale.gradient, change.grad, rtol=1e-4, atol=1e-4)


def test_the_gradient_at_the_head_is_that_of_the_divergence(home: Path, tmp_path: Path) -> None:
    job = solved_job(home, tmp_path)
    wanted = _Wanted(job.decoder, job.sequences, job.collected)
    h = wanted.states(3)[-1].clone().requires_grad_()
    p, q = (job.decoder.tail(x).log_softmax(-1) for x in (wanted.original(3), h))
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    kl.backward()
    value, gradient = wanted.at_head(3, h)
    assert value == pytest.approx(float(kl.detach()), rel=1e-5)
    assert torch.allclose(gradient, h.grad, rtol=1e-4, atol=1e-7)  # type: ignore[arg-type]


class Killed(BaseException):
    """Not an error that anything handles."""


class Kill(Silent):
    """Ends the run at a step of the tuning."""

    def __init__(self, at: int) -> None:
        self.at, self.label = at, ""

    def start(self, label: str, total: int) -> None:
        self.label = label

    def advance(self, steps: int = 1) -> None:
        self.at -= steps if self.label == "tune scales" else 0
        if self.label == "tune scales" and self.at <= 0:
            raise Killed


@pytest.mark.parametrize("at", [1, 7, 17])
def test_a_killed_run_resumes_to_identical_bytes(
    home: Path, tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SAVES", 4)
    data = {"calibration": home / "ids.safetensors", "n_sequences": N, "sequence_length": 24, "tune": 2}
    quantize(home / "llama", tmp_path / "whole", **GRID, **data)
    with pytest.raises(Killed):
        quantize(home / "llama", tmp_path / "killed", progress=Kill(at), **GRID, **data)
    left = tmp_path / "killed.work" / "solved" / "tuned" / "2"
    assert [path.name for path in left.glob("*")] == (["unfinished.safetensors"] if at > 6 else [])
    quantize(home / "llama", tmp_path / "killed", **GRID, **data)
    for name in ("model.safetensors", "bakron.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()


def test_what_is_stored_is_what_was_tuned(home: Path, tmp_path: Path) -> None:
    """Stage by stage, with an export that refuses before, and whose record has the divergence before and after."""
    data = {"calibration": str(home / "ids.safetensors"), "n_sequences": N, "sequence_length": 24}
    work = tmp_path / "work"
    stages.collect(home / "llama", work, **GRID, **data, format="dense")
    stages.solve(work)
    stages.export(work, tmp_path / "plain")
    before = {path: path.stat().st_mtime_ns for path in (work / "solved" / "solved").glob("*")}
    with pytest.raises(Killed):
        stages.solve(work, tune=1, progress=Kill(5))
    with pytest.raises(ConfigError, match=r"not tuned yet. Run: bakron solve"):
        stages.export(work, tmp_path / "out")
    job = stages.solve(work, tune=1)
    assert {path: path.stat().st_mtime_ns for path in (work / "solved" / "solved").glob("*")} == before
    record = stages.export(work, tmp_path / "out")
    weights, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "plain"))
    for spec in job.flat_targets:
        assert torch.equal(weights[spec.tensor_key].float(), job.decoder.get_weight(spec.name))
    assert any(not torch.equal(value, plain[key]) for key, value in weights.items())
    assert record["tuned"]["kl"][1] < record["tuned"]["kl"][0] and record["settings"]["tune"] == 1
    assert "tuned" not in json.loads((tmp_path / "plain" / "bakron.json").read_text())


def test_scales_that_do_not_help_are_thrown_away(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = solved_job(home, tmp_path / "plain")
    monkeypatch.setattr(tuning, "RATE", 0.9)
    notes: list[str] = []
    monkeypatch.setattr(Silent, "note", lambda self, message: notes.append(message))
    job = solved_job(home, tmp_path / "wild", tune=1)
    assert any("thrown away" in note for note in notes)
    for b in range(job.decoder.n_blocks):
        for name, layer in job._layers(b).items():
            assert torch.equal(layer.scale, plain._layers(b)[name].scale)
            assert torch.equal(job.decoder.get_weight(name), plain.decoder.get_weight(name))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tune": -1}, "tune: -1 is negative"),
        ({"tune": 1, "method": "rtn"}, "tune: 1 passes over calibration text, and method rtn reads none"),
        ({"tune": 1, "offload": "disk"}, "tune: every step needs the whole model, and offload disk"),
        ({"tune": 1, "hessians": "x", "inputs": "static"}, "and given factors have none"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**changes)


def test_other_facts_are_still_refused(home: Path, tmp_path: Path) -> None:
    solved_job(home, tmp_path, tune=1)
    with pytest.raises(ResumeError, match="refine"):
        solved_job(home, tmp_path, tune=1, refine=1)
