"""Claims about ``bakron plan``: its losses are nats per token, its choice is the best one, and its file is a recipe.

1. Scale: every Fisher estimator's c·H_out ⊗ H_in is the Fisher matrix where that is a Kronecker product; on a model, ½·c·f
   is the KL divergence that a small error of one linear makes, measured.
2. Losses are those of the weights that a static run with the candidate everywhere stores.
3. The choice is the best of all, by brute force; linears that engines join have one scheme; the budget is what is stored.
4. The recipe gives back the settings and the schemes; quantize and compare go by it.
5. A run that dies and runs again writes the same bytes; other budgets use what was measured; other settings are refused.
6. Bad input is one named error before anything is written.

Kinds: oracle, property, behaviour.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from autograd_oracle import load_whole, observe, sampled_labels, set_weight
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny_models import tiny_decoder
from typer.testing import CliRunner

import bakron
from bakron.cli import app
from bakron.core.layers import LinearSpec, Scheme
from bakron.errors import BakronError, ConfigError, FormatError, OutputExistsError, ResumeError
from bakron.estimators import Fisher, Iterated, estimator_names, get_estimator, number_of_passes
from bakron.run.allocate import plan
from bakron.run.collect import factors
from bakron.run.factors import unpacked
from bakron.run.pipeline import Job
from bakron.run.recipe import recipe_text, rules_for
from bakron.run.rules import scheme_of
from bakron.run.settings import Settings

DATA: dict[str, Any] = {"n_sequences": 6, "sequence_length": 50}
FISHER = [name for name in estimator_names() if isinstance(get_estimator(name), Fisher)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model ``m``, its float32 twin ``f`` and a text."""
    path = tmp_path_factory.mktemp("home")
    tiny_decoder("llama", path / "m", tokenizer=True, dtype=torch.bfloat16, max_position_embeddings=512)
    tiny_decoder("llama", path / "f", tokenizer=True, max_position_embeddings=512)
    words = "the quick brown fox jumps over the lazy dog while seven wizards play chess".split()
    for name, n in (("text.txt", 2000), ("held.txt", 700)):
        (path / name).write_text(" ".join(random.Random(n).choices(words, k=n)))
    return path


def planned(home: Path, out: Path, **options: Any) -> dict[str, Any]:
    chosen = {"bpw": 4.2, "group_sizes": [16], "calibration": home / "text.txt", **DATA, **options}
    return plan(home / "m", out, **{**chosen, "calibration": str(chosen["calibration"])})


# 1. Scale


def test_the_estimators_with_a_scale() -> None:
    assert FISHER == ["kfac", "sequence", "shampoo", "token"]


@pytest.mark.parametrize("name", FISHER)
def test_the_scaled_product_is_a_fisher_matrix_that_is_a_kronecker_product(name: str) -> None:
    """All pairs of directions of g and x, so that E[vec(G) vec(G)ᵀ] = A ⊗ B exactly; sequences of one token."""
    generator = torch.Generator().manual_seed(0)
    m, n = 3, 5
    roots = [torch.randn(size, size, generator=generator) for size in (m, n)]
    A, B = (root @ root.T for root in roots)
    tokens = [
        (n**0.5 * roots[1][:, j][None], m**0.5 * roots[0][:, i][None]) for i in range(m) for j in range(n)
    ]
    estimator: Any = get_estimator(name)
    H_in = H_out = None
    for done in range(number_of_passes(estimator)):
        if done:
            assert isinstance(estimator, Iterated) and H_in is not None
        now = estimator.after(done, H_in, H_out) if done else estimator
        terms = [now.terms(x, g if now.needs_gradients else None, True) for x, g in tokens]
        H_in, H_out = (
            before if parts[0] is None else sum(parts) / len(parts)
            for before, parts in zip((H_in, H_out), zip(*terms, strict=True), strict=True)
        )
    assert H_in is not None and H_out is not None
    seen = estimator.fisher_scale(H_in) * torch.kron(H_out, H_in)
    torch.testing.assert_close(seen, torch.kron(A, B), rtol=1e-4, atol=1e-4)
    assert estimator.fisher_scale(torch.zeros(n, n)) * torch.kron(H_out, torch.zeros(n, n)).abs().max() == 0


LINEARS = ("model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj", "model.layers.0.mlp.up_proj")
SCALE: dict[str, Any] = {"inputs": "static", "group_size": 16, "n_sequences": 24, "sequence_length": 200}


@pytest.fixture(scope="module")
def fisher_traces(home: Path) -> dict[str, float]:
    """tr F of linears, per token, as 2·KL/ε² of random errors of size ε: measured on the text, without any gradient."""
    size, draws = 1e-3, 16
    job = Job(str(home / "f"), Settings.load(**SCALE, calibration=str(home / "text.txt")), home / "unused")
    original, changed = load_whole(home / "f"), load_whole(home / "f")
    traces = dict.fromkeys(LINEARS, 0.0)
    with torch.no_grad():
        ids = torch.stack(job.sequences[:4])
        p = original(ids, use_cache=False).logits.double().log_softmax(-1)
        for name, draw in itertools.product(LINEARS, range(draws)):
            W = original.get_submodule(name).weight
            set_weight(
                changed, name, W + size * torch.randn(W.shape, generator=torch.Generator().manual_seed(draw))
            )
            q = changed(ids, use_cache=False).logits.double().log_softmax(-1)
            traces[name] += 2 * float((p.exp() * (p - q)).sum()) / ids.numel() / size**2 / draws
            set_weight(changed, name, W)
    return traces


@pytest.mark.parametrize("name", FISHER)
def test_half_the_scaled_loss_is_the_kl_divergence_of_a_small_error(
    home: Path, tmp_path: Path, fisher_traces: dict[str, float], name: str
) -> None:
    """Of errors without preferred directions, f of which is c·tr H_out·tr H_in, so that what counts is the scale alone.

    Labels and errors are sampled, hence the tolerance (with 48 draws 0.76 to 0.97); the power iterations keep what fits a Kronecker product, so they have less.
    """
    settings = Settings.load(**SCALE, estimator=name, calibration=str(home / "text.txt"))
    job = Job(str(home / "f"), settings, tmp_path)
    job.collect()
    estimator = get_estimator(name)
    assert isinstance(estimator, Fisher)
    per_token = 1 if estimator.per_token else len(job.sequences) / sum(map(len, job.sequences))
    ratios = {}
    for b in range(2):
        stored = unpacked(job.collected.load(factors(job.need, b)))
        for linear in (linear for linear in LINEARS if f".{b}." in linear):
            owner = linear if f"{linear}.H_in" in stored else linear.replace("up_proj", "gate_proj")
            H_in, H_out = stored[f"{owner}.H_in"], stored[f"{linear}.H_out"]
            trace = estimator.fisher_scale(H_in) * per_token * float(H_in.trace() * H_out.trace())
            ratios[linear] = trace / fisher_traces[linear]
    low = {"shampoo": 0.65, "kfac": 0.65}.get(name, 0.5)
    assert all(low < ratio < 1.5 for ratio in ratios.values()), ratios


# 2. Losses


def test_losses_are_those_of_what_a_static_run_stores(home: Path, tmp_path: Path) -> None:
    """½ tr(H_out E H_in Eᵀ)/tr(H_in) per sequence, over the tokens of one, with factors by autograd over the whole model."""
    record = planned(home, tmp_path / "plan.toml", n_sequences=3)
    rows = {row["name"]: row for row in record["layers"]}
    assert len(rows) == 14
    whole = load_whole(home / "m")
    for i, bits in enumerate((2, 3, 4)):
        options = {**DATA, "n_sequences": 3, "calibration": str(home / "text.txt")}
        job = Job(
            str(home / "m"),
            Settings.load(bits=bits, group_size=16, inputs="static", **options),
            tmp_path / str(bits),
        )
        job.collect()
        job.solve()
        seen = [
            observe(whole, ids, list(rows), sampled_labels(whole, ids, 0, index))
            for index, ids in enumerate(job.sequences)
        ]
        for name, row in rows.items():
            G = torch.stack([of[name].G for of in seen])
            E = job.decoder.get_weight(name).double() - whole.get_submodule(name).weight.detach().double()
            H_in, H_out = (G.mT @ G).mean(0), (G @ G.mT).mean(0)
            f = float((H_out @ E @ H_in * E).sum())
            expected = 0.5 * f / float(H_in.trace()) * 3 / record["n_tokens"]
            assert row["kl"][i] == pytest.approx(expected, rel=2e-3), (name, bits)
    for i, row in enumerate(record["uniform"]):
        assert row["kl"] == pytest.approx(sum(layer["kl"][i] for layer in record["layers"]))


# 3. The choice


def test_the_choice_is_the_best_of_all(home: Path, tmp_path: Path) -> None:
    """Over all 3⁸ choices for the sets that engines join, with bytes as the export counts them."""
    record = planned(home, tmp_path / "plan.toml")
    sets: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in record["layers"]:
        block, linear = row["name"].split(".")[2], row["name"].rpartition(".")[2]
        part = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "mlp", "up": "mlp"}.get(
            linear.split("_")[0], linear
        )
        sets.setdefault((block, part), []).append(row)
    assert len(sets) == 8
    for rows in sets.values():
        assert len({(row["bits"], row["group_size"]) for row in rows}) == 1
    size = [
        [sum(r["weights"] * (b / 8 + 2 / 16) + 16 for r in rows) for b in (2, 3, 4)] for rows in sets.values()
    ]
    loss = [[sum(r["kl"][i] for r in rows) for i in range(3)] for rows in sets.values()]
    weights = sum(row["weights"] for row in record["layers"])
    best = min(
        sum(of[i] for of, i in zip(loss, choice, strict=True))
        for choice in itertools.product(range(3), repeat=8)
        if 8 * sum(of[i] for of, i in zip(size, choice, strict=True)) <= 4.2 * weights
    )
    assert record["kl"] == pytest.approx(best, rel=1e-9)
    assert record["bits_per_weight"] <= 4.2
    assert {row["bits"] for row in record["layers"]} > {4} and record["uniform"][1]["kl"] > record["kl"]


# 4. The recipe


def test_quantize_goes_by_the_plan(home: Path, tmp_path: Path) -> None:
    record = planned(home, tmp_path / "plan.toml", act_order="in", skip=["0.mlp.down_proj"])
    made = bakron.quantize(home / "m", tmp_path / "out", recipe=tmp_path / "plan.toml")
    assert made["bits_per_weight"] == record["bits_per_weight"] <= 4.2
    chosen = {row["name"]: (row["bits"], row["group_size"]) for row in record["layers"]}
    assert {row["name"]: (row["bits"], row["group_size"]) for row in made["layers"]} == chosen
    assert len(chosen) == 13 and made["settings"]["act_order"] == "in"
    assert bakron.verify(tmp_path / "out")["layers"] == 13
    head = (tmp_path / "plan.toml").read_text().splitlines()
    assert head[0].startswith(
        f"# {record['bits_per_weight']:.4f} bits per weight, predicted KL {record['kl']:.4g}"
    )
    assert head[1].startswith("# 2 bit, group 16 everywhere: ")


def test_compare_shows_the_plan_beside_equal_bits(home: Path, tmp_path: Path) -> None:
    record = planned(home, tmp_path / "plan.toml")
    methods = f"bakron,bakron:recipe={tmp_path / 'plan.toml'}"
    arguments = [
        "compare", home / "m", "--methods", methods, "--bits", "3", "--group-size", 16, "--text", home / "held.txt",
        "--calibration", home / "text.txt", "--n-sequences", 6, "--sequence-length", 50, "--work", tmp_path / "w",
        "--eval-n-sequences", 3, "--eval-sequence-length", 40, "--json", "-q",
    ]  # fmt: skip
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.stderr
    _, equal, mixed = json.loads(result.stdout)
    assert (equal["label"], mixed["label"]) == ("bakron 3 bit", "bakron mixed recipe=plan.toml")
    assert mixed["bits_per_weight"] == record["bits_per_weight"] and mixed["bits"] in ("2/3/4", "3/4")
    assert mixed["kl"] != equal["kl"]


@given(st.data())
def test_rules_give_back_any_choice(data: st.DataObject) -> None:
    """Of twelve blocks, so that names of some are the beginning of others'."""
    names = [("attn.q", "attn.k"), ("attn.o",), ("mlp.experts.0.up", "mlp.experts.1.up")]
    choices = st.sampled_from(
        [Scheme(2, 64, True), Scheme(3, 64, True), Scheme(3, -1, True), Scheme(4, 32, False)]
    )
    units, schemes = [], {}
    for b, of in itertools.product(range(12), names):
        scheme = data.draw(choices)
        unit = [LinearSpec(f"m.h.{b}.{name}", "", b, 3 + len(name), 5) for name in of]
        units.append(unit)
        schemes |= {spec.name: scheme for spec in unit}
    base, rules = rules_for("m.h", units, schemes)
    assert {name: scheme_of(name, base, rules) for name in schemes} == schemes
    assert len(rules) <= 9
    settings = Settings(
        bits=base.bits, group_size=base.group_size, symmetric=base.symmetric, layers=tuple(rules)
    )
    assert_reads_back(settings)


def assert_reads_back(settings: Settings) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recipe.toml"
        path.write_text(recipe_text(settings, ["a comment"]), encoding="utf-8")
        assert Settings.load(path) == settings


@hypothesis_settings(max_examples=30)
@given(
    st.builds(
        Settings,
        method=st.sampled_from(["bakron", "gptq"]),
        estimator=st.sampled_from([None, "kfac"]),
        aim=st.sampled_from([None, 0.25, 1e-07]),
        percdamp_in=st.floats(0, 10),
        calibration=st.none() | st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])),
        skip=st.lists(st.sampled_from([r"\.0\.", "it's", 'a"b', r"it's\d"])).map(tuple),
        symmetric=st.booleans(),
    )
)
def test_recipes_give_back_any_settings(settings: Settings) -> None:
    assert_reads_back(settings)


# 5. Resume


class Death(BaseException):
    """Stands for the end of the process."""


def test_death_around_every_file_and_a_rerun_give_identical_bytes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    options = {"n_sequences": 2, "bits": [2, 4], "skip": ["attn"]}
    expected = planned(home, tmp_path / "expected" / "plan.toml", **options)
    publish, deaths, published = os.replace, 0, 0

    def replace(source: Any, target: Any) -> None:
        nonlocal published
        publish(source, target)
        published += 1
        if published == 3:
            raise Death

    monkeypatch.setattr("os.replace", replace)
    for _ in range(40):
        published = 0
        try:
            seen = planned(home, tmp_path / "out" / "plan.toml", overwrite=True, **options)
            break
        except Death:
            deaths += 1
    assert deaths >= 6 and seen == expected
    one, two = (tmp_path / name / "plan.toml" for name in ("expected", "out"))
    assert one.read_bytes() == two.read_bytes()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plan.toml"]


def test_other_budgets_and_candidates_use_what_was_measured(home: Path, tmp_path: Path) -> None:
    work = {"work": tmp_path / "work", "keep_work": True}
    first = planned(home, tmp_path / "a.toml", **work)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*.safetensors")}
    second = planned(home, tmp_path / "b.toml", bpw=4.6, bits=[3, 4], **work)
    third = planned(home, tmp_path / "c.toml", bpw=5, bits=[3, 5], **work)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*.safetensors")}
    assert {path: after[path] for path in before} == before
    assert {path.name for path in after.keys() - before.keys()} == {"5bit-16-symmetric.safetensors"}
    assert [row["kl"][1:] for row in first["layers"]] == [row["kl"] for row in second["layers"]]
    assert second["kl"] < first["kl"] and third["bits_per_weight"] <= 5


def test_losses_measured_otherwise_are_refused_by_name(home: Path, tmp_path: Path) -> None:
    work = {"work": tmp_path / "work", "keep_work": True}
    planned(home, tmp_path / "a.toml", **work)
    with pytest.raises(ResumeError, match=r"percdamp_out = 'auto', now percdamp_out = 0\.5"):
        planned(home, tmp_path / "b.toml", percdamp_out=0.5, **work)
    with pytest.raises(
        ResumeError, match=r"seed = 0, now calibration = \w+, seed = 1|seed = 0, now .*seed = 1"
    ):
        planned(home, tmp_path / "b.toml", seed=1, **work)


# 6. Bad input


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"bpw": 2.0},
            ConfigError,
            r"bpw: 2\.0 is below .* 3\.\d+ to 5\.\d+ bits .*smaller bits or larger groups",
        ),
        ({"bpw": 9.0}, ConfigError, r"bpw: 9\.0 is above .*larger bits or smaller groups"),
        ({"bits": [3]}, ConfigError, "two candidates or more, seen 3 bit, group 16"),
        ({"bits": [3, 9]}, ConfigError, "bits: 9 is not"),
        ({"group_sizes": [16, 0]}, ConfigError, "group_size: 0"),
        ({"group_sizes": [16, 24]}, FormatError, r"down_proj.*group_size 24 does not divide d_in 64"),
        ({"symmetric": False}, FormatError, "zero points beside another scheme"),
        (
            {"format": "dense"},
            ConfigError,
            "format: dense takes 16 bits per weight whatever.*compressed-tensors",
        ),
        ({"method": "gptq"}, ConfigError, "estimator: gram gives losses of another unit.*shampoo"),
        ({"method": "rtn"}, ConfigError, "estimator: identity"),
        ({"estimator": "mlp_local_shampoo"}, ConfigError, "estimator: mlp_local_shampoo"),
        ({"labels": "data"}, ConfigError, "labels: .*choose model"),
        ({"hessians": "h", "inputs": "static"}, ConfigError, "hessians: .*leave given ones out"),
        ({"layers": [{"pattern": "down", "bits": 3}]}, ConfigError, r"remove \[\[layers\]\]"),
        ({"calibration": "absent.txt"}, BakronError, "no such file"),
    ],
)
def test_bad_input_is_refused_by_name_before_work(
    home: Path, tmp_path: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=f"(?s){match}"):
        planned(home, tmp_path / "plan.toml", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_only_when_asked(home: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"plan\.toml: exists"):
        planned(home, tmp_path / "plan.toml")
    assert (tmp_path / "plan.toml").read_text() == "mine"
    planned(home, tmp_path / "plan.toml", overwrite=True)
    assert Settings.load(tmp_path / "plan.toml").layers


def test_gptq_is_planned_with_a_fisher_estimator(home: Path, tmp_path: Path) -> None:
    """Its losses are in the whole metric, of which its solver sees one side."""
    options = {"estimator": "kfac", "bits": [3, 4]}
    two, one = (
        planned(home, tmp_path / f"{m}.toml", method=m, bpw=4.6, **options) for m in ("bakron", "gptq")
    )
    assert all(b["kl"] != g["kl"] for b, g in zip(two["layers"], one["layers"], strict=True))
    assert two["uniform"][0]["kl"] < one["uniform"][0]["kl"]
    assert Settings.load(tmp_path / "gptq.toml").method == "gptq"


# 7. The command


def test_the_command_shows_tables_and_json(home: Path, tmp_path: Path) -> None:
    arguments = [
        "plan", home / "m", "-o", tmp_path / "a.toml", "--bpw", 4.2, "--group-size", "16,-1", "--bits", "2,4",
        "--calibration", home / "text.txt", "--n-sequences", 3, "--sequence-length", 40,
    ]  # fmt: skip
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.stderr
    for part in ("model.layers.*.mlp.down_proj", "KL at 2/-1", "2/16 everywhere", "plan"):
        assert part in result.stdout, result.stdout
    for part in ("memory", "measure every candidate: 56 of 56", "quantize", "--recipe"):
        assert part in result.stderr, result.stderr
    assert not (tmp_path / "a.toml.work").exists()
    arguments[3] = tmp_path / "b.toml"
    result = CliRunner().invoke(app, [*map(str, arguments), "--json", "-q"])
    assert result.stderr == "" and len(json.loads(result.stdout)["layers"]) == 14
    assert (tmp_path / "a.toml").read_bytes() == (tmp_path / "b.toml").read_bytes()
    result = CliRunner().invoke(app, [*map(str, arguments), "--bits", "x"])
    assert result.exit_code == 2 and "'x' is not a whole number" in result.stderr
