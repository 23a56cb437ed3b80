"""Claims about Hessian factors as files: one layout for all, what is wrong with it is named, and it adds up.

1. Layout: a plain reader gets the factors by the formula of docs/hessians.md, and the metadata say what they are of.
2. Given factors: a solve with them is that of the collection they come from, packed or whole; without H_out it is GPTQ's.
3. Refusals: every way in which a directory can be wrong is named before work starts.
4. Show: the numbers are those of dense eigenvalues; a collection agrees with itself, whatever its scale.
5. Merge: collections over parts of a text make the factors of all of it; what does not add up is refused.

Kinds: oracle, property, regression, behaviour.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from autograd_oracle import load_whole, observe
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import TINY_VOCAB, tiny_decoder
from torch import Tensor
from typer.testing import CliRunner

from bakron.api import PERCDAMP_OUT
from bakron.cli import app
from bakron.core.noise import relative_error
from bakron.core.packed import pack, unpack
from bakron.core.spectrum import agreement, largest_eigenvalue, spread
from bakron.errors import (
    BakronError,
    ConfigError,
    MissingExtraError,
    NonFiniteError,
    OutputExistsError,
    ResumeError,
    ShapeError,
)
from bakron.run import stages
from bakron.run.compare import compare
from bakron.run.factors import Factors
from bakron.run.merge import merge_hessians
from bakron.run.pipeline import quantize
from bakron.run.plot import plot_spectra
from bakron.run.progress import Silent
from bakron.run.settings import Settings
from bakron.run.spectra import show_hessians
from bakron.run.store import model_fingerprint

LENGTHS = (17, 9, 23, 12, 20)
GRID: dict[str, Any] = {"bits": 3, "group_size": 16, "format": "dense"}
DATA: dict[str, Any] = {"sampling": "per-sample", "sequence_length": 64, "inputs": "static", "labels": "data"}
PARTS = {"first": slice(0, 3), "second": slice(3, 5), "all": slice(0, 5)}


class Listener(Silent):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with models ``llama``, ``gpt2`` and ``gemma``, and token ids of all sequences and of two parts of them."""
    path = tmp_path_factory.mktemp("home")
    for family in ("llama", "gpt2", "gemma"):
        tiny_decoder(family, path / family, tokenizer=True)
    ids = torch.randint(2, TINY_VOCAB, (5, max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    mask = torch.stack([(torch.arange(max(LENGTHS)) < n).long() for n in LENGTHS])
    for name, part in PARTS.items():
        rows = {"input_ids": ids[part].contiguous(), "attention_mask": mask[part].contiguous()}
        save_file(rows, path / f"{name}.safetensors")
    return path


def collection(home: Path, part: str = "all", model: str = "llama", **settings: Any) -> Path:
    """The directory of the factors of a part of the sequences, collected once."""
    work = home / "-".join([model, part, *map(str, settings.values())])
    if not work.exists():
        options = {**GRID, **DATA, **settings, "n_sequences": len(LENGTHS[PARTS[part]])}
        stages.collect(home / model, work, calibration=str(home / f"{part}.safetensors"), **options)
    return Factors(work).path


def whole(packed: Tensor) -> Tensor:
    """The lines of docs/hessians.md."""
    n = (math.isqrt(8 * len(packed) + 1) - 1) // 2
    H = torch.zeros(n, n)
    H[*torch.tril_indices(n, n)] = packed
    return H + H.tril(-1).T


def read(directory: Path) -> dict[str, Tensor]:
    """All factors as whole matrices, read without bakron."""
    tensors = {k: v for file in sorted(directory.glob("*.safetensors")) for k, v in load_file(file).items()}
    return {k: whole(v) for k, v in tensors.items() if not k.endswith("token_weights")}


def metadata_of(file: Path) -> dict[str, Any]:
    with safe_open(file, framework="pt") as opened:
        return {key: json.loads(value) for key, value in opened.metadata().items()}


def of_each_linear(directory: Path) -> dict[str, Tensor]:
    """All factors as whole matrices, shared ones under every name."""
    H = read(directory)
    for file in sorted(directory.glob("*.safetensors")):
        for name, other in metadata_of(file)["shared_H_in"].items():
            H[f"{name}.H_in"] = H[f"{other}.H_in"]
    return H


def foreign(directory: Path, out: Path, change: Any = None, metadata: dict[str, str] | None = None) -> Path:
    """What another program might write: one file, whole matrices by name, no metadata."""
    out.mkdir(parents=True)
    tensors = {key: value.contiguous() for key, value in of_each_linear(directory).items()}
    for_file = tensors if change is None else change(tensors)
    save_file({key: value.clone() for key, value in for_file.items()}, out / "mine.safetensors", metadata)
    return out


def run(*arguments: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.stdout + result.stderr + repr(result.exception)
    return result


# 1. Layout


@given(st.integers(0, 40), st.integers(0, 10**6))
def test_a_packed_triangle_is_the_symmetric_matrix(n: int, seed: int) -> None:
    H = torch.randn(n, n, generator=torch.Generator().manual_seed(seed))
    packed, symmetric = pack(H), (H + H.T) / 2
    assert packed.dtype == torch.float32 and len(packed) == n * (n + 1) // 2
    assert torch.equal(whole(packed), symmetric) and torch.equal(unpack(packed), symmetric)


@pytest.mark.parametrize("n", [511, 512, 513, 1100])
def test_large_triangles_are_packed_in_parts(n: int) -> None:
    H = torch.randn(n, n, dtype=torch.float64)
    assert torch.equal(unpack(pack(H)), ((H + H.T) / 2).float())


def test_lengths_that_are_no_triangle_are_refused() -> None:
    for length in (2, 4, 5, 7, 527):
        with pytest.raises(ShapeError, match=f"seen {length}"):
            unpack(torch.zeros(length))


def test_a_collection_is_in_the_layout(home: Path) -> None:
    directory = collection(home, estimator="kfac")
    H, model = read(directory), load_whole(home / "llama")
    name, ids = "model.layers.1.mlp.up_proj", load_file(home / "all.safetensors")
    seen = []
    for row, mask in zip(ids["input_ids"], ids["attention_mask"], strict=True):
        tokens = row[mask.bool()]
        seen.append(observe(model, tokens, [name], torch.cat([tokens[1:], torch.tensor([-100])]))[name])
    x, g = (torch.cat([getattr(s, key) for s in seen]) for key in ("x", "g"))
    metadata = metadata_of(directory / "0001.safetensors")
    owner = metadata["shared_H_in"][name]
    for key, rows in ((f"{owner}.H_in", x), (f"{name}.H_out", g)):
        expected = (rows.T @ rows / len(rows)).float()
        torch.testing.assert_close(H[key], expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    assert (metadata["n_sequences"], metadata["n_tokens"]) == (5, sum(LENGTHS))
    assert (metadata["estimator"], metadata["labels"], metadata["layout"]) == ("kfac", "data", 1)
    assert metadata["model"] == model_fingerprint(home / "llama")
    assert len(set(metadata["data"])) == 5


# 2. Given factors


@pytest.mark.parametrize("layout", ["collected", "whole matrices"])
def test_a_solve_with_given_factors_is_that_of_their_collection(
    home: Path, tmp_path: Path, layout: str
) -> None:
    """In another directory, and with no text at all."""
    collected = collection(home, estimator="shampoo")
    grid = {**GRID, "percdamp_out": PERCDAMP_OUT}  # as whole matrices do not tell their errors
    options = {**grid, **DATA, "n_sequences": 5}
    quantize(home / "llama", tmp_path / "own", calibration=home / "all.safetensors", **options)
    given = tmp_path / "given"
    if layout == "collected":
        shutil.copytree(collected, given)
    else:
        foreign(collected, given)
    record = quantize(home / "llama", tmp_path / "out", hessians=given, inputs="static", **grid)
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "own" / name).read_bytes()
    known = layout == "collected"
    assert record["method"] == f"bakron ({'shampoo' if known else 'given'} Hessians)"
    assert record["layers"][0]["n_tokens"] == (sum(LENGTHS) if known else 0)
    assert record["settings"]["hessians"] == "given"
    assert record["calibration"]["fingerprint"] == Factors(given).sha256


def test_damping_is_chosen_for_given_factors_whose_error_is_known(home: Path, tmp_path: Path) -> None:
    directory = collection(home, estimator="shampoo")
    options = {**GRID, "inputs": "static"}
    record = quantize(home / "llama", tmp_path / "known", hessians=directory, **options)
    rows = {row["name"]: row["H_out"]["error"] for row in show_hessians(directory)}
    assert {row["name"]: row["error_out"] for row in record["layers"]} == rows
    assert all(0 < error < 1 for error in rows.values())


def test_unknown_errors_of_given_factors_are_told_and_damped_by_a_fixed_number(
    home: Path, tmp_path: Path
) -> None:
    unknown = foreign(collection(home, estimator="shampoo"), tmp_path / "unknown")
    assert all(row["H_out"]["error"] is None for row in show_hessians(unknown))
    options = {**GRID, "inputs": "static", "hessians": unknown}
    auto, fixed = Listener(), Listener()
    record = quantize(home / "llama", tmp_path / "auto", progress=auto, **options)
    assert {row["percdamp"][1] for row in record["layers"]} == {PERCDAMP_OUT}
    [note] = [note for note in auto.notes if "does not tell" in note]
    assert "the error of 14 H_out of 14" in note and note.endswith("percdamp_out 2.")
    quantize(home / "llama", tmp_path / "fixed", progress=fixed, percdamp_out=PERCDAMP_OUT, **options)
    assert not any("does not tell" in note for note in fixed.notes)
    name = "model.safetensors"
    assert (tmp_path / "auto" / name).read_bytes() == (tmp_path / "fixed" / name).read_bytes()


def test_without_H_out_it_is_gptq(home: Path, tmp_path: Path) -> None:
    """For all linears, or for those alone that have none; the user is told how many."""
    collected = collection(home, estimator="kfac")
    listener = Listener()

    def some(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: value for key, value in tensors.items() if "up_proj.H_out" not in key}

    def none(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: value for key, value in tensors.items() if not key.endswith("H_out")}

    weights = {}
    for name, change, method in (("gptq", None, "gptq"), ("none", none, "bakron"), ("some", some, "bakron")):
        given = foreign(collected, tmp_path / "given" / name, change)
        out = tmp_path / name
        quantize(
            home / "llama", out, hessians=given, inputs="static", method=method, progress=listener, **GRID
        )
        weights[name] = load_file(out / "model.safetensors")
    assert all(torch.equal(value, weights["none"][key]) for key, value in weights["gptq"].items())
    same = {key for key, value in weights["gptq"].items() if torch.equal(value, weights["some"][key])}
    assert {key for key in same if "_proj" in key} == {f"model.layers.{b}.mlp.up_proj.weight" for b in (0, 1)}
    numbers = [note.partition(" linears have no H_out") for note in listener.notes]
    assert [number for number, found, _ in numbers if found] == ["14 of 14", "2 of 14"]


def test_other_factors_are_not_resumed_with(home: Path, tmp_path: Path) -> None:
    given = shutil.copytree(collection(home, estimator="shampoo"), tmp_path / "given")
    options = {**GRID, "hessians": given, "inputs": "static", "work": tmp_path / "work", "keep_work": True}
    quantize(home / "llama", tmp_path / "one", **options)
    moved = shutil.move(given, tmp_path / "moved")
    quantize(home / "llama", tmp_path / "two", **{**options, "hessians": moved})  # the same ones elsewhere
    shutil.rmtree(moved)
    shutil.copytree(collection(home, "first", estimator="shampoo"), moved)
    with pytest.raises(ResumeError, match="hessians = "):
        quantize(home / "llama", tmp_path / "three", **{**options, "hessians": moved})


def test_the_stages_and_compare_take_given_factors(home: Path, tmp_path: Path) -> None:
    collected = collection(home, estimator="kfac")
    work, text = tmp_path / "work", str(home / "all.safetensors")
    stages.collect(home / "llama", work, calibration=text, estimator="kfac", **GRID, **DATA, n_sequences=5)
    stages.solve(
        work, hessians=str(collected)
    )  # the estimator that was collected with does not stand in the way
    stages.export(work, tmp_path / "out")
    quantize(home / "llama", tmp_path / "direct", hessians=collected, inputs="static", **GRID)
    one, two = (tmp_path / name / "model.safetensors" for name in ("out", "direct"))
    assert one.read_bytes() == two.read_bytes()
    settings = {"calibration": text, "inputs": "static", "n_sequences": 5, "sampling": "per-sample", **GRID}
    variants = {
        "given": Settings.load(**settings, hessians=str(collected)),
        "own": Settings.load(**settings, estimator="kfac", labels="data"),
    }
    rows = compare(
        home / "llama", variants, home / "all.safetensors", tmp_path / "c", n_sequences=2, sequence_length=10
    )
    assert rows[1]["kl"] == pytest.approx(rows[2]["kl"], rel=1e-6)


# 3. Refusals

NAME = "model.layers.0.self_attn.o_proj"


def dropped(*keys: str) -> Any:
    return lambda tensors: {key: value for key, value in tensors.items() if not key.endswith(keys)}


def replaced(key: str, value: Any) -> Any:
    return lambda tensors: {**tensors, key: value(tensors[key]) if callable(value) else value}


@pytest.mark.parametrize(
    ("change", "metadata", "error", "message"),
    [
        (dropped(f"{NAME}.H_in"), None, ConfigError, rf"1 of 14 linears have no H_in there, {NAME} first"),
        (dropped("H_in"), None, ConfigError, "Collect with inputs static"),
        (replaced(f"{NAME}.H_in", torch.eye(16)), None, ShapeError, rf"{NAME}: expected H_in \(32, 32\).*seen \(16, 16\)"),
        (replaced(f"{NAME}.H_out", torch.ones(2, 3)), None, ShapeError, rf"{NAME}.H_out: expected \(n, n\).*\(2, 3\)"),
        (replaced(f"{NAME}.H_out", torch.ones(5)), None, ShapeError, rf"{NAME}.H_out: expected a packed triangle.*seen 5"),
        (replaced(f"{NAME}.H_in", lambda H: H.triu()), None, ShapeError, rf"{NAME}.H_in: not symmetric"),
        (replaced(f"{NAME}.H_in", lambda H: H * torch.nan), None, NonFiniteError, rf"{NAME}.H_in: "),
        (replaced(f"{NAME}.H_out", lambda H: pack(H) * torch.inf), None, NonFiniteError, rf"{NAME}.H_out: "),
        (replaced(f"{NAME}.H_out", lambda H: H.half()), None, ConfigError, rf"{NAME}.H_out: expected float32 .*F16"),
        (replaced(f"{NAME}.Hout", torch.eye(32)), None, ConfigError, rf"'{NAME}.Hout': expected keys <linear>.H_in"),
        (None, {"n_tokens": "0"}, ConfigError, "n_tokens: expected a whole number above 0, seen 0"),
        (None, {"n_sequences": "many"}, ConfigError, "n_sequences: .*seen 'many'"),
        (None, {"layout": "2"}, ConfigError, "expected layout 1, seen 2"),
        (None, {"model": '"0123"'}, ConfigError, "fingerprint 0123"),
        (None, {"shared_H_in": '{"a": "b"}'}, ConfigError, "a has the H_in of b, which is not there"),
        (None, {"squares_out": '{"a": -1}'}, ConfigError, "squares_out: expected a JSON object of numbers"),
        (None, {"shared_H_in": "[1]"}, ConfigError, "shared_H_in: expected a JSON object"),
    ],
)  # fmt: skip
def test_wrong_factors_are_named_before_work_starts(
    home: Path,
    tmp_path: Path,
    change: Any,
    metadata: dict[str, str] | None,
    error: type[BakronError],
    message: str,
) -> None:
    given = foreign(collection(home, estimator="kfac"), tmp_path / "given", change, metadata)
    with pytest.raises(error, match=message) as raised:
        quantize(home / "llama", tmp_path / "out", hessians=given, inputs="static", **GRID)
    assert str(given) in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["given"]


def test_directories_that_hold_no_factors_are_named(home: Path, tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "absent", "there is no such directory"),
        (tmp_path, "has no .safetensors file and no collected factors"),
        (home / "llama", "expected keys <linear>.H_in"),
    ):
        with pytest.raises(ConfigError, match=message):
            Factors(path)
    work = tmp_path / "work"
    for name in ("gram", "kfac"):
        shutil.copytree(collection(home, estimator="kfac"), work / "collected" / "factors" / name)
    with pytest.raises(ConfigError, match="several collections.*factors/gram, .*factors/kfac"):
        Factors(work)
    damaged = work / "collected" / "factors" / "gram"
    (damaged / "0001.safetensors").write_bytes((damaged / "0001.safetensors").read_bytes()[:50])
    with pytest.raises(ConfigError, match="0001.safetensors: cannot be read"):
        Factors(damaged)
    copied = work / "collected" / "factors" / "kfac"
    shutil.copy(copied / "0001.safetensors", copied / "0002.safetensors")
    with pytest.raises(ConfigError, match="is in 0001.safetensors too"):
        Factors(copied)


# 4. Show


def test_shown_numbers_are_those_of_dense_eigenvalues(home: Path) -> None:
    directory = collection(home, estimator="kfac")
    rows, H = show_hessians(directory), of_each_linear(directory)
    assert len(rows) == 14
    for row in rows:
        assert (row["n_sequences"], row["n_tokens"]) == (5, sum(LENGTHS))
        for side in ("H_in", "H_out"):
            dense = H[f"{row['name']}.{side}"].double()
            values = torch.linalg.eigvalsh(dense)
            square = float(values.square().sum())
            assert row[side] == {
                "size": len(dense),
                "trace": pytest.approx(float(values.sum()), rel=1e-9),
                "effective_rank": pytest.approx(float(values.sum()) ** 2 / square, rel=1e-9),
                "peak": pytest.approx(float(values[-1] / values.mean()), rel=1e-9),
                "off_diagonal": pytest.approx(1 - float(dense.diagonal().square().sum()) / square, abs=1e-9),
            } | ({"error": error_of(directory, row["name"], dense)} if side == "H_out" else {})


def error_of(directory: Path, name: str, H_out: Tensor) -> float:
    (squares,) = (
        of["squares_out"][name] for of in map(metadata_of, directory.iterdir()) if name in of["squares_out"]
    )
    return relative_error(H_out, squares, len(LENGTHS))


@given(st.integers(1, 120), st.integers(1, 120), st.floats(0, 4), st.integers(0, 10**6))
def test_the_largest_eigenvalue_is_found_from_below(n: int, rank: int, decay: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(n, rank, generator=generator, dtype=torch.float64)
    A = A * torch.arange(1, n + 1, dtype=torch.float64)[:, None] ** -decay
    largest = float(torch.linalg.eigvalsh(A @ A.T)[-1])
    assert largest * (1 - 1e-3) <= largest_eigenvalue(A @ A.T) <= largest * (1 + 1e-9)


def test_spread_and_agreement_of_simple_matrices() -> None:
    ones = spread(torch.ones(4, 4))
    assert (ones.effective_rank, ones.peak, ones.off_diagonal) == pytest.approx((1, 4, 0.75))
    zero = torch.zeros(3, 3)
    assert spread(zero).effective_rank == spread(zero).peak == spread(zero).off_diagonal == 0
    a, b = torch.diag(torch.tensor([1.0, 0.0])), torch.diag(torch.tensor([0.0, 5.0]))
    assert (agreement(a, b).difference, agreement(a, b).cosine) == pytest.approx((2**0.5, 0))
    assert (agreement(a, 7 * a).difference, agreement(a, 7 * a).cosine) == pytest.approx((0, 1))
    assert (agreement(zero, zero).difference, agreement(zero, zero).cosine) == (0, 1)
    assert (agreement(zero, torch.eye(3)).difference, agreement(zero, torch.eye(3)).cosine) == (1, 0)


def test_another_directory_is_compared(home: Path, tmp_path: Path) -> None:
    first, second = (collection(home, part, estimator="kfac") for part in ("first", "second"))
    rows, A, B = show_hessians(first, second), of_each_linear(first), of_each_linear(second)
    for row in rows:
        a, b = (H[f"{row['name']}.H_out"].double() for H in (A, B))
        a, b = a / a.trace(), b / b.trace()
        expected = float((a - b).norm() / torch.maximum(a.norm(), b.norm()))
        assert row["H_out"]["difference"] == pytest.approx(expected, rel=1e-9)
        assert row["H_out"]["cosine"] == pytest.approx(float((a * b).sum() / a.norm() / b.norm()), rel=1e-9)
    for row in show_hessians(
        first, foreign(first, tmp_path / "x", lambda t: {k: 3 * v for k, v in t.items()})
    ):
        assert row["H_in"]["difference"] < 1e-6 and row["H_in"]["cosine"] > 1 - 1e-9
    gram = show_hessians(first, collection(home, "first", estimator="gram"))
    assert all(row["H_out"]["difference"] is None and row["H_in"]["cosine"] > 0.999 for row in gram)
    lacking = foreign(first, tmp_path / "y", dropped(f"{NAME}.H_in", f"{NAME}.H_out"))
    with pytest.raises(ConfigError, match=f"has no {NAME}"):
        show_hessians(first, lacking)


def test_show_prints_a_table_for_each_side_or_json(home: Path) -> None:
    first, second = (collection(home, part, estimator="kfac") for part in ("first", "second"))
    shown = run("hessians", "show", first, second).stdout
    assert shown.count(NAME) == 2
    assert all(word in shown for word in ("H_in", "H_out", "sequences", "rank", "peak", "differ", "cosine"))
    assert json.loads(run("hessians", "show", first, second, "--json", "-q").stdout) == show_hessians(
        first, second
    )


def test_a_plot_needs_matplotlib_and_a_known_format(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = collection(home, estimator="shampoo")
    with pytest.raises(ConfigError, match=r"ends in \.png, \.svg, \.pdf"):
        plot_spectra(directory, tmp_path / "spectra.txt")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"bakron\[bench\]"):
        plot_spectra(directory, tmp_path / "spectra.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib (extra bench)")
@pytest.mark.parametrize("estimator", ["shampoo", "gram"])
def test_spectra_are_drawn(home: Path, tmp_path: Path, estimator: str) -> None:
    run("hessians", "show", collection(home, estimator=estimator), "--plot", tmp_path / "spectra.svg", "-q")
    drawn = (tmp_path / "spectra.svg").read_text()
    assert drawn.count('<g id="axes_') == (14 if estimator == "shampoo" else 4)


# 5. Merge


@pytest.mark.parametrize(
    ("estimator", "model"),
    [
        ("gram", "llama"),
        ("kfac", "llama"),
        ("shampoo", "llama"),
        ("attention_local_shampoo", "llama"),
        ("shampoo", "gpt2"),
    ],
)
def test_merged_parts_are_the_factors_of_the_whole(
    home: Path, tmp_path: Path, estimator: str, model: str
) -> None:
    parts = [collection(home, part, model, estimator=estimator) for part in ("first", "second")]
    facts = merge_hessians(tmp_path / "merged", parts)
    merged, *seen, expected = map(
        read, [tmp_path / "merged", *parts, collection(home, model=model, estimator=estimator)]
    )
    assert merged.keys() == expected.keys()
    key = "n_tokens" if estimator != "shampoo" else "n_sequences"
    assert (facts["n_sequences"], facts["n_tokens"]) == (5, sum(LENGTHS))
    shares = [metadata_of(part / "0000.safetensors")[key] / facts[key] for part in parts]
    for name, H in expected.items():
        size = sum(share * of[name].abs() for share, of in zip(shares, seen, strict=True))
        # three roundings to float32, and float32 products of each sequence, whose order does not depend on its part
        assert bool(((merged[name] - H).abs() <= 2**-23 * size).all()), name
    metadata = metadata_of(tmp_path / "merged" / "0001.safetensors")
    whole_metadata = metadata_of(collection(home, model=model, estimator=estimator) / "0001.safetensors")
    assert sorted(metadata.pop("data")) == sorted(whole_metadata.pop("data"))
    squares = [of.pop("squares_out", {}) for of in (metadata, whole_metadata)]
    assert bool(squares[1]) == (estimator != "gram")
    assert squares[0] == {name: pytest.approx(value, rel=1e-4) for name, value in squares[1].items()}
    assert metadata == whole_metadata
    assert not any("token_weights" in k for k in load_file(tmp_path / "merged" / "0000.safetensors"))


def test_a_factor_that_one_part_lacks_is_zero_there(home: Path, tmp_path: Path) -> None:
    """As of an expert that gets no token of it."""
    first, second = (collection(home, part, estimator="kfac") for part in ("first", "second"))
    lacking = shutil.copytree(first, tmp_path / "lacking")
    for file in lacking.iterdir():
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        save_file(dropped(f"{NAME}.H_out")(load_file(file)), file, metadata)
    merge_hessians(tmp_path / "merged", [lacking, second])
    merged, of_second = read(tmp_path / "merged"), read(second)
    share = sum(LENGTHS[PARTS["second"]]) / sum(LENGTHS)
    torch.testing.assert_close(merged[f"{NAME}.H_out"], share * of_second[f"{NAME}.H_out"])


def test_a_merge_of_a_merge_is_the_merge_of_all(home: Path, tmp_path: Path) -> None:
    """Three parts, in another order; the result solves like the collection."""
    first, second = (collection(home, part, estimator="shampoo") for part in ("first", "second"))
    merge_hessians(tmp_path / "a", [second, first])
    other = home / "other.safetensors"
    save_file({"input_ids": torch.arange(20, 36).reshape(2, 8)}, other)
    options = {**GRID, **DATA, "estimator": "shampoo", "n_sequences": 2}
    stages.collect(home / "llama", tmp_path / "third", calibration=str(other), **options)
    merge_hessians(tmp_path / "b", [tmp_path / "third", tmp_path / "a"])
    merge_hessians(tmp_path / "c", [first, second, tmp_path / "third"])
    b, c = read(tmp_path / "b"), read(tmp_path / "c")
    for key, value in c.items():
        torch.testing.assert_close(b[key], value, rtol=1e-5, atol=1e-6 * float(value.abs().max()))
    record = quantize(home / "llama", tmp_path / "out", hessians=tmp_path / "b", inputs="static", **GRID)
    assert {row["n_sequences"] for row in record["layers"]} == {7}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"estimator": "gram"}, "estimator is 'kfac' in .*first.* and 'gram' in .*second"),
        ({"estimator": "kfac", "labels": "model"}, "labels is 'data' in .* and 'model' in "),
        ({"estimator": "kfac", "inputs": "sequential"}, "has no H_in, which .* has"),
        ({"estimator": "kfac", "model": "gemma"}, "model is '[0-9a-f]{64}' in .* and '[0-9a-f]{64}' in "),
    ],
)
def test_collections_of_different_kinds_are_not_merged(
    home: Path, tmp_path: Path, other: dict[str, str], message: str
) -> None:
    directories = [collection(home, "first", estimator="kfac"), collection(home, "second", **other)]
    with pytest.raises(ConfigError, match=message):
        merge_hessians(tmp_path / "merged", directories)
    assert not list(tmp_path.iterdir())


def test_other_numbers_of_labels_are_not_merged_and_the_same_number_is_kept(
    home: Path, tmp_path: Path
) -> None:
    drawn = {"estimator": "shampoo", "labels": "model"}
    one, two, other = (
        collection(home, part, **drawn, **more)
        for part, more in (("first", {"label_samples": 2}), ("second", {"label_samples": 2}), ("second", {}))
    )
    with pytest.raises(ConfigError, match="label_samples is 2 in .* and None in .*same label_samples"):
        merge_hessians(tmp_path / "merged", [one, other])
    assert merge_hessians(tmp_path / "merged", [one, two])["label_samples"] == 2
    assert metadata_of(tmp_path / "merged" / "0000.safetensors")["label_samples"] == 2


def test_the_same_data_is_not_merged_twice(home: Path, tmp_path: Path) -> None:
    for part, message in (("first", "3 of 3"), ("all", "3 of 5")):
        directories = [collection(home, one, estimator="kfac") for one in ("first", part)]
        with pytest.raises(ConfigError, match=f"{message} calibration sequences in common"):
            merge_hessians(tmp_path / "merged", directories)


def test_factors_of_several_passes_do_not_add_up(home: Path, tmp_path: Path) -> None:
    directories = [collection(home, part, estimator="token") for part in ("first", "second")]
    with pytest.raises(ConfigError, match="token takes several passes"):
        merge_hessians(tmp_path / "merged", directories)


def test_merged_sequential_collections_hold_H_out_alone_and_are_not_solved_with(
    home: Path, tmp_path: Path
) -> None:
    directories = [
        collection(home, part, estimator="shampoo", inputs="sequential") for part in ("first", "second")
    ]
    merge_hessians(tmp_path / "merged", directories)
    assert all(key.endswith(".H_out") for key in read(tmp_path / "merged"))
    with pytest.raises(ConfigError, match="no H_in there, only an H_out.*Collect with inputs static"):
        quantize(home / "llama", tmp_path / "out", hessians=tmp_path / "merged", inputs="static", **GRID)
    assert not (tmp_path / "out.work").exists()


def test_what_merging_must_know_is_asked_for(home: Path, tmp_path: Path) -> None:
    first, second = (
        shutil.copytree(collection(home, p, estimator="kfac"), tmp_path / p) for p in ("first", "second")
    )
    with pytest.raises(ConfigError, match="at least two"):
        merge_hessians(tmp_path / "merged", [first])
    file = second / "0000.safetensors"
    with safe_open(file, framework="pt") as opened:
        known = opened.metadata()
    for key in ("n_tokens", "data", "model", "estimator"):
        save_file(load_file(file), file, {k: v for k, v in known.items() if k != key})
        with pytest.raises(ConfigError, match=key):
            merge_hessians(tmp_path / "merged", [first, second])
    file.unlink()
    with pytest.raises(ConfigError, match="second: has no 0000.safetensors"):
        merge_hessians(tmp_path / "merged", [first, second])
    assert not (tmp_path / "merged").exists()


def test_merge_never_writes_over_anything(home: Path, tmp_path: Path) -> None:
    first, second = (collection(home, part, estimator="kfac") for part in ("first", "second"))
    with pytest.raises(OutputExistsError, match="not empty"):
        merge_hessians(first, [first, second])
    result = run("hessians", "merge", tmp_path / "merged", first, second, "--json")
    assert json.loads(result.stdout)["n_tokens"] == sum(LENGTHS)
    assert "--hessians" in result.stderr
    again = run("hessians", "merge", tmp_path / "merged", first, second, code=2)
    assert "not empty" in again.stderr
