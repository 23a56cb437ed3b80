"""Claims: the accuracy benchmark measures every row with the same ids, windows and evaluator, once, and says which rows
cannot be; what a library hands back is applied whole or refused; the table's intervals are those of its windows.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_decoder

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers")]

import accuracy  # noqa: E402
from accuracy_rows import PEERS, ROWS, Setting, row_of, unsupported  # noqa: E402
from accuracy_table import interval, table  # noqa: E402
from controls import KINDS, write_control  # noqa: E402
from whole import Original, bits_per_weight  # noqa: E402

from bakron.core.packed import pack  # noqa: E402
from bakron.errors import ConfigError  # noqa: E402
from bakron.evals.quality import Quality, Reference, evaluate  # noqa: E402
from bakron.models import load_decoder  # noqa: E402
from bakron.run.compare import compare  # noqa: E402
from bakron.run.factors import SIDES, Factors  # noqa: E402
from bakron.run.settings import Settings  # noqa: E402
from bakron.run.store import write_tensors  # noqa: E402

WORDS = "the quick brown fox jumps over a lazy dog while wizards play "
LENGTHS = {"n_sequences": 3, "sequence_length": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("accuracy")
    tiny_decoder("llama", path / "model", tokenizer=True)
    (path / "text.txt").write_text(WORDS * 9)
    (path / "held.txt").write_text(WORDS[::-1] * 9)
    return path


def arguments(folder: Path, **changed: Any) -> Namespace:
    values = {
        "model": str(folder / "model"),
        "calibration": str(folder / "text.txt"),
        "heldout": [f"words={folder / 'held.txt'}"],
        "settings": [Setting(3, 16)],
        "draws": [0],
        "rows": ["rtn", "gptq", "hqq"],
        **{**LENGTHS, "eval_n_sequences": 4, "eval_sequence_length": 24, "threads": 1},
        "work": folder / "work",
        "results": folder / "results.jsonl",
        "keep_weights": False,
    }
    return Namespace(**{**values, **changed})


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(ROOT / "src"))
    found = accuracy.measure(arguments(folder), {"bakron": sys.executable, "hqq": "none"})
    patch.undo()
    return found


def test_rows_are_what_compare_measures_of_the_same_settings(
    folder: Path, results: list[dict[str, Any]]
) -> None:
    variants = {
        name: Settings(
            method=name, bits=3, group_size=16, calibration=str(folder / "text.txt"), device="cpu", **LENGTHS
        )
        for name in ("rtn", "gptq")
    }
    expected = compare(
        folder / "model",
        variants,
        folder / "held.txt",
        folder / "compared",
        n_sequences=4,
        sequence_length=24,
    )
    assert [row["row"] for row in results] == ["rtn", "gptq", "hqq"]
    for row, same in zip(results, expected[1:], strict=False):
        for name in Quality.__dataclass_fields__:
            assert row[name] == same[name]
        assert row["bits_per_weight"] == same["bits_per_weight"] and not row["reused"]
        assert row["original"] == expected[0]["perplexity"]
        assert sum(row["kl_windows"]) / 4 == pytest.approx(row["kl"])
        assert row["seconds"] > 0 and row["peak_rss"] > 0
    assert results[0]["draw"] is results[0]["calibration"] is None and results[1]["draw"] == 0


def test_what_a_library_cannot_do_is_a_row(folder: Path, results: list[dict[str, Any]]) -> None:
    assert "zero point" in results[2]["not_supported"]
    assert results == [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_finished_rows_are_not_measured_again_and_new_domains_are(
    folder: Path, results: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def one(_args: Any, _pythons: Any, row: str, *rest: Any) -> dict[Any, dict[str, Any]]:
        asked.append((row, [domain.name for domain in rest[-1]]))
        raise accuracy.Failed("as asked")

    monkeypatch.setattr(accuracy, "one", one)
    before = (folder / "results.jsonl").read_text()
    assert accuracy.measure(arguments(folder), {}) == results
    assert not asked
    args = arguments(
        folder, rows=["gptq"], heldout=[*arguments(folder).heldout, f"own={folder / 'text.txt'}"]
    )
    assert accuracy.measure(args, {}) == results[1:2]  # the one that failed is left out
    assert asked == [("gptq", ["own"])]
    assert accuracy.measure(arguments(folder, draws=[1]), {}) == [results[0], results[2]]
    assert accuracy.measure(arguments(folder, settings=[Setting(4, 16)], rows=["rtn"]), {}) == []
    assert asked[1:] == [("gptq", ["words"]), ("rtn", ["words"])]
    assert (folder / "results.jsonl").read_text() == before


def test_a_process_that_fails_says_why_and_a_complete_answer_is_taken(tmp_path: Path) -> None:
    asked = {"out": str(tmp_path / "out"), "threads": 1}
    with pytest.raises(accuracy.Failed, match="hqq: ended with status"):
        accuracy.quantize(sys.executable, "hqq", asked)
    (tmp_path / "out" / "result.json").write_text('{"seconds": 1}')
    assert accuracy.quantize("none", "hqq", asked) == {"seconds": 1}
    with pytest.raises(FileNotFoundError):
        accuracy.quantize("none", "hqq", {**asked, "bits": 3})


def test_all_that_changed_is_handed_back_and_applied(folder: Path) -> None:
    model = load_decoder(folder / "model", dtype=torch.float32).model
    original = Original(model)
    generator = torch.Generator().manual_seed(0)
    layer = model.model.layers[0]
    for parameter in (layer.self_attn.q_proj.weight, layer.input_layernorm.weight):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    weights = original.changes(model)
    assert len(weights) == 2 * 7 + 1 and "model.layers.0.input_layernorm.weight" in weights

    decoder = load_decoder(folder / "model", dtype=torch.float32)
    ids = [torch.arange(2, 20)]
    reference = Reference(load_decoder(folder / "model", dtype=torch.float32), ids)
    accuracy.apply(decoder, weights)
    changed = load_decoder(folder / "model", dtype=torch.float32)
    changed.model.load_state_dict(model.state_dict())
    assert evaluate(decoder, ids, reference) == evaluate(changed, ids, reference)
    assert evaluate(decoder, ids, reference).kl > 0


@pytest.mark.parametrize("outside", ["model.norm.weight", "lm_head.weight", "model.layers.9.x.weight"])
def test_weights_of_other_places_or_missing_ones_are_refused(folder: Path, outside: str) -> None:
    decoder = load_decoder(folder / "model", dtype=torch.float32)
    weights = {f"{s.name}.weight": decoder.get_weight(s.name) for block in decoder.linears for s in block}
    with pytest.raises(accuracy.Failed, match=outside):
        accuracy.apply(decoder, {**weights, outside: torch.zeros(1)})
    missing = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(accuracy.Failed, match=missing):
        accuracy.apply(decoder, {name: value for name, value in weights.items() if name != missing})


def test_every_row_has_a_script_and_settings_are_parsed() -> None:
    for name, row in ROWS.items():
        assert (ROOT / "benchmarks" / "peers" / f"{row.peer}_model.py").exists()
        assert row.peer in (*PEERS, "bakron")
        assert (unsupported(name, Setting(4, 64)) is None) == (row.peer != "hqq")
        assert unsupported(name, Setting(2, 32, symmetric=False)) is None
    assert [str(Setting.parse(text)) for text in ("4:64", "2:32:asym")] == ["4:64", "2:32:asym"]
    for text in ("4", "4:64:sym", "x:64"):
        with pytest.raises(ValueError, match="is not BITS:GROUP"):
            Setting.parse(text)
    assert bits_per_weight(2, 32, zero_bits=2) == 2 + 18 / 32


def test_a_row_may_be_bakron_with_other_settings() -> None:
    row = row_of("bakron:aim=0.5:inputs=static")
    assert (row.peer, row.has_data) == ("bakron", True)
    assert row.options == {"method": "bakron", "aim": 0.5, "inputs": "static"}
    assert row_of("gptq") is ROWS["gptq"]
    for wrong, reason in (
        ("hqq:axis=0", "only bakron's own"),
        ("gptaq", "not one of"),
        ("gptq:aim", "expected"),
    ):
        with pytest.raises(ConfigError, match=reason):
            row_of(wrong)


def test_negative_controls_have_the_wrong_H_out(tmp_path: Path) -> None:
    H = {(b, side): torch.diag(torch.arange(1.0, 6) + 10 * b) for b in range(4) for side in SIDES}
    for b in range(4):
        tensors = {f"model.{b}.up.{side}": pack(H[b, side]) for side in SIDES}
        write_tensors(tmp_path / "factors" / f"{b}.safetensors", tensors, {"n_sequences": 3})
    for kind in KINDS:
        write_control(tmp_path / "factors", tmp_path / kind, kind)
    shuffled, other = (Factors(tmp_path / kind) for kind in ("shuffled", "other-block"))
    for b in range(4):
        assert all(torch.equal(f.load(f"model.{b}.up", "H_in"), H[b, "H_in"]) for f in (shuffled, other))
        assert torch.equal(other.load(f"model.{b}.up", "H_out"), H[(b + 2) % 4, "H_out"])
        moved = shuffled.load(f"model.{b}.up", "H_out")
        assert not torch.equal(moved, H[b, "H_out"])
        assert torch.equal(moved.diagonal().sort().values, H[b, "H_out"].diagonal())


def made_up(row: str, draw: int | None, windows: list[float], **more: Any) -> dict[str, Any]:
    grid = {"bits": 3, "group_size": 64, "symmetric": True, "domain": "words", "row": row, "draw": draw}
    facts = {"kl": sum(windows) / len(windows), "kl_windows": windows, "perplexity": 20.0, "top1": 0.5}
    return {
        **grid,
        **facts,
        "bits_per_weight": 3.25,
        "seconds": 60.0,
        "peak_rss": 2e9,
        "original": 10.0,
    } | more


def test_the_table_compares_the_same_draws_on_the_same_windows() -> None:
    lines = table(
        [
            made_up("bakron", 0, [0.1, 0.3]),
            made_up("bakron", 1, [0.3, 0.5], reused=True),
            made_up("rtn", None, [0.6, 1.2]),
            made_up("gptq", 1, [0.6, 1.0]),
            {**made_up("hqq", None, [0.0]), "not_supported": "no such grid"},
        ],
        "bakron",
    ).splitlines()
    assert len({line.count("|") for line in lines[:-2]}) == 1
    assert "| KL / bakron (95 %) |" in lines[0]
    assert "| bakron | 3.25 | 0.3000 (0.2000–0.4000) | 0.2000 0.4000 | 1.0000 (1.0000–1.0000) |" in lines[2]
    assert "| 50.0 % | ≥ 60 | 2.0 |" in lines[2]
    assert "| 0.9000 | 3.0000 (3.0000–3.0000) |" in lines[3]  # three times bakron's mean, in each window
    assert "| 0.8000 | 2.0000 (2.0000–2.0000) |" in lines[4]  # twice draw 1's, in each window
    assert "| hqq | not supported: no such grid |" in lines[5]
    assert lines[-1] == "The original's perplexity is 10.00 on words."


def test_intervals_narrow_as_windows_come() -> None:
    import numpy as np

    rng = np.random.default_rng(1)
    few, many = rng.normal(1, 0.1, 25), rng.normal(1, 0.1, 2500)
    low, high = interval(many)
    assert low < many.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * 0.1 / 50, rel=0.1)
    assert interval(few)[1] - interval(few)[0] > 5 * (high - low)
