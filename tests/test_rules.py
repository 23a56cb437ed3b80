"""Claims about bits by layer: rules say what differs and where, wrong ones are named, and all stages go by them.

1. Rules: from recipes and from Python; later ones win, setting by setting; what is wrong is named.
2. Sets of linears that engines join have one scheme, or the run is refused before anything is written.
3. A run: every layer is solved, counted, stored and reported in its own scheme; changed rules are not resumed.

Kinds: behaviour, regression.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_decoder
from typer.testing import CliRunner

import bakron
from bakron.cli import app
from bakron.core.layers import Scheme
from bakron.errors import ConfigError, FormatError, ResumeError
from bakron.models import load_decoder
from bakron.run.pipeline import Job
from bakron.run.rules import LayerRule, scheme_of
from bakron.run.settings import Settings

RECIPE = """
bits = 3
group_size = 16

[[layers]]
pattern = '(q|k|v)_proj'
bits = 4
group_size = 32

[[layers]]
pattern = 'layers\\.1\\.self_attn\\.(q|k|v)_proj'
bits = 8

[[layers]]
pattern = 'model.layers.0.mlp.down_proj'
group_size = -1
bits = 2
"""


def expected(name: str) -> Scheme:
    """What RECIPE says of a linear."""
    if name.endswith(("q_proj", "k_proj", "v_proj")):
        return Scheme(8 if ".1." in name else 4, 32, True)
    return Scheme(2, -1, True) if name == "model.layers.0.mlp.down_proj" else Scheme(3, 16, True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model ``m``, a text, and RECIPE."""
    path = tmp_path_factory.mktemp("home")
    tiny_decoder("llama", path / "m", tokenizer=True, dtype=torch.bfloat16)
    words = "the quick brown fox jumps over the lazy dog while seven wizards play chess".split()
    (path / "text.txt").write_text(" ".join(random.Random(0).choices(words, k=300)))
    (path / "recipe.toml").write_text(RECIPE)
    return path


DATA: dict[str, Any] = {"n_sequences": 3, "sequence_length": 40}


def run_recipe(home: Path, out: Path, **options: Any) -> dict[str, Any]:
    return bakron.quantize(
        home / "m", out, recipe=home / "recipe.toml", calibration=home / "text.txt", **{**DATA, **options}
    )


# 1. Rules


def test_later_rules_win_setting_by_setting() -> None:
    rules = [
        LayerRule("proj", bits=2),
        LayerRule("q_proj", group_size=-1),
        LayerRule("0.q", bits=8, symmetric=False),
    ]
    default = Scheme(4, 64, True)
    assert scheme_of("0.q_proj", default, rules) == Scheme(8, -1, False)
    assert scheme_of("1.q_proj", default, rules) == Scheme(2, -1, True)
    assert scheme_of("1.k_proj", default, rules) == Scheme(2, 64, True)
    assert scheme_of("fc", default, rules) == default


def test_recipes_and_python_say_the_same(home: Path) -> None:
    loaded = Settings.load(home / "recipe.toml")
    tables = loaded.as_dict()["layers"]
    assert tables[2] == {"pattern": "model.layers.0.mlp.down_proj", "bits": 2, "group_size": -1}
    assert Settings.load(bits=3, group_size=16, layers=tables) == loaded
    assert Settings(bits=3, group_size=16, layers=loaded.layers) == loaded
    assert Settings.load(**json.loads(json.dumps(loaded.as_dict()))) == loaded
    assert "layers" not in Settings().as_dict()  # so that nothing changes where there are none


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("down_proj", "layers: 'down_proj' is a str, expected a list of tables"),
        (["down_proj"], "layers: expected tables with a pattern"),
        ([{"bits": 3}], r"expected tables with a pattern.*seen \{'bits': 3\}"),
        ([{"pattern": "(", "bits": 3}], r"'\(': not a regular expression"),
        ([{"pattern": 3, "bits": 3}], "for 3: not a regular expression"),
        ([{"pattern": "down"}], "'down': says nothing"),
        ([{"pattern": "down", "bit": 3}], "'down': unknown setting 'bit'; did you mean 'bits'"),
        ([{"pattern": "down", "bits": 9}], "'down': bits: 9 is not"),
        ([{"pattern": "down", "bits": True}], "'down': bits: True is a bool"),
        ([{"pattern": "down", "bits": "3"}], "'down': bits: '3' is a str"),
        ([{"pattern": "down", "symmetric": 1}], "'down': symmetric: 1 is a int"),
        ([{"pattern": "down", "group_size": 0}], "'down': group_size: 0 is neither"),
    ],
)
def test_wrong_rules_are_named(layers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings.load(layers=layers)


# 2. Sets that engines join


@pytest.mark.parametrize(
    ("family", "sets"),
    [
        ("llama", [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]),
        ("phi3", [("qkv_proj",), ("o_proj",), ("gate_up_proj",), ("down_proj",)]),
        ("gpt2", [("c_attn",), ("c_proj",), ("c_fc",), ("c_proj",)]),
    ],
)
def test_linears_that_engines_join_are_found(
    tmp_path: Path, family: str, sets: list[tuple[str, ...]]
) -> None:
    decoder = load_decoder(tiny_decoder(family, tmp_path / "m"))
    assert [tuple(n.rpartition(".")[2] for n in names) for names in decoder.fused] == 2 * sets
    assert sorted(n for names in decoder.fused for n in names) == sorted(
        s.name for b in decoder.linears for s in b
    )


def refused(home: Path, tmp_path: Path, error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        bakron.quantize(home / "m", tmp_path / "out", method="rtn", group_size=16, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_rule_that_splits_such_a_set_is_refused_by_name_before_work(home: Path, tmp_path: Path) -> None:
    layers = [{"pattern": r"layers\.1\.self_attn\.k_proj", "bits": 8}]
    match = r"(?s)join.*layers\.1.*q_proj: 4 bit, group 16\n.*k_proj: 8 bit, group 16\n.*v_proj: 4 bit, group 16\n.*Change"
    refused(home, tmp_path, ConfigError, match, layers=layers)
    refused(home, tmp_path, ConfigError, r"gate_proj: 4 bit, group 16\n.*up_proj: 4 bit, whole row",
            layers=[{"pattern": "up_proj", "group_size": -1}])  # fmt: skip


def test_a_rule_that_matches_nothing_is_refused_by_name_before_work(home: Path, tmp_path: Path) -> None:
    layers = [{"pattern": "dwn_proj", "bits": 8}]
    refused(
        home,
        tmp_path,
        ConfigError,
        r"'dwn_proj' is found in the name of no linear.*model\.layers\.0",
        layers=layers,
    )


def test_what_the_format_cannot_hold_is_refused_before_work(home: Path, tmp_path: Path) -> None:
    refused(home, tmp_path, FormatError, "0.mlp.down_proj.*group_size 24",
            layers=[{"pattern": "down_proj", "group_size": 24}])  # fmt: skip
    refused(
        home,
        tmp_path,
        FormatError,
        "zero points beside",
        layers=[{"pattern": "down_proj", "symmetric": False}],
    )


# 3. A run


def test_every_layer_is_solved_and_stored_in_its_own_scheme(home: Path, tmp_path: Path) -> None:
    record = run_recipe(home, tmp_path / "out", keep_work=True)
    pieces: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out.work" / "solved" / "solved").glob("*.safetensors"):
        pieces |= load_file(file)
    assert len(record["layers"]) == 14
    for row in record["layers"]:
        scheme, codes = expected(row["name"]), pieces[f"{row['name']}.codes"]
        assert (row["bits"], row["group_size"], row["symmetric"]) == (scheme.bits, scheme.group_size, True)
        limit = 2 ** (scheme.bits - 1)
        assert -limit <= int(codes.min()) and int(codes.max()) <= limit - 1
        assert int(codes.max()) - int(codes.min()) > limit
        groups = 1 if scheme.group_size == -1 else codes.shape[1] // scheme.group_size
        assert pieces[f"{row['name']}.scale"].shape == (codes.shape[0], groups)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    packed = [value for key, value in stored.items() if key.rpartition(".")[2].startswith("weight_")]
    weights = sum(row["weights"] for row in record["schemes"])
    assert record["bits_per_weight"] == 8 * sum(value.nbytes for value in packed) / weights
    assert record["bits"] == "2/3/4/8"
    assert [(r["bits"], r["group_size"], r["linears"]) for r in record["schemes"]] == [
        (2, -1, 1), (3, 16, 7), (4, 32, 3), (8, 32, 3),
    ]  # fmt: skip
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# m, 2/3/4/8 bit" in card and "| 8 | 32 | symmetric | 3 | 2048 |" in card
    assert bakron.verify(tmp_path / "out")["layers"] == 14


def test_stages_write_the_same_bytes_and_tables_show_the_bits(home: Path, tmp_path: Path) -> None:
    run_recipe(home, tmp_path / "one")
    data = ["--n-sequences", "3", "--sequence-length", "40", "--calibration", str(home / "text.txt")]
    steps = [
        ["collect", str(home / "m"), str(tmp_path / "w"), "--recipe", str(home / "recipe.toml"), *data],
        ["solve", str(tmp_path / "w")],
        ["export", str(tmp_path / "w"), str(tmp_path / "two")],
    ]
    for step in steps:
        result = CliRunner().invoke(app, step)
        assert result.exit_code == 0, result.stderr
    assert "2/3/4/8 bit" in result.stdout and "2 × 1, 3 × 1" in result.stdout
    for name in ("model.safetensors", "config.json", "README.md", "bakron.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_eval_reads_each_layer_in_its_own_scheme(home: Path, tmp_path: Path) -> None:
    """``load_decoder`` takes another way than ``verify``: each layer by the group that names it."""
    run_recipe(home, tmp_path / "packed")
    run_recipe(home, tmp_path / "dense", format="dense")
    packed, dense = (load_decoder(tmp_path / name) for name in ("packed", "dense"))
    for specs in dense.linears:
        for spec in specs:
            assert torch.equal(packed.get_weight(spec.name), dense.get_weight(spec.name)), spec.name


def test_work_under_other_rules_is_not_resumed(home: Path, tmp_path: Path) -> None:
    run_recipe(home, tmp_path / "out", keep_work=True)
    rules = [{"pattern": "down_proj", "bits": 2}]
    with pytest.raises(ResumeError, match="layers"):
        run_recipe(home, tmp_path / "out", overwrite=True, layers=rules)


def test_rules_that_come_to_one_scheme_write_what_one_scheme_writes(home: Path, tmp_path: Path) -> None:
    options = {"bits": 3, "group_size": 16, "calibration": str(home / "text.txt"), **DATA}
    bakron.quantize(home / "m", tmp_path / "one", **options)
    bakron.quantize(
        home / "m", tmp_path / "two", **{**options, "bits": 4}, layers=[{"pattern": "", "bits": 3}]
    )
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_a_job_without_rules_has_one_scheme(home: Path, tmp_path: Path) -> None:
    job = Job(str(home / "m"), Settings(method="rtn", bits=5, group_size=16), tmp_path)
    assert list(job.by_scheme) == [Scheme(5, 16, True)] and len(job.schemes) == 14
