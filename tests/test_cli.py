"""Claims about the command line: everything can be reached from it, results are right, and errors are one message.

1. It starts without the heavy imports; every command and option has help; options are the fields of Settings.
2. quantize writes what Python's quantize writes; the stages write the same bytes; recipes and options combine.
3. eval, compare and verify report numbers that agree with each other, as tables and as JSON on stdout alone.
4. verify finds a single changed value, lists exactly that layer, and refuses what it cannot check.
5. Bad input ends with one message and exit code 2 before anything is written; Ctrl-C with 130, resumable.
6. demo does all of it; progress tells the time left.

Kinds: behaviour, regression.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from tiny_models import tiny_decoder
from typer.testing import CliRunner

import bakron
from bakron.cli import app, commands, console, options
from bakron.errors import ConfigError, MissingExtraError, ModelError, NonFiniteError, VerificationError
from bakron.models import reload as reload_module
from bakron.run import demonstration
from bakron.run.progress import Silent
from bakron.run.settings import Settings
from bakron.run.stages import JOB
from bakron.run.variants import make_variants

DATA = ["--n-sequences", "3", "--sequence-length", "48"]
HELD_OUT = ["--n-sequences", "3", "--sequence-length", "40"]
REPORTING = {
    "quantize",
    "export",
    "eval",
    "compare",
    "plan",
    "verify",
    "demo",
    "hessians show",
    "hessians merge",
}


def run(*arguments: Any, code: int = 0) -> Any:
    """The outcome of ``bakron ARGUMENTS``, which must exit with ``code`` and show no traceback."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    seen = result.stdout + result.stderr
    assert result.exit_code == code, seen + repr(result.exception)
    assert "Traceback" not in seen
    return result


def said(result: Any) -> str:
    """The one error message of a failed command."""
    assert result.stderr.count("error: ") == 1, result.stderr
    return result.stderr.partition("error: ")[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model ``m``, a calibration text and a held-out text."""
    path = tmp_path_factory.mktemp("home")
    tiny_decoder("llama", path / "m", tokenizer=True, dtype=torch.bfloat16)
    words = "the quick brown fox jumps over the lazy dog while seven wizards play chess".split()
    generator = torch.Generator().manual_seed(0)
    for name, n in (("text.txt", 200), ("held.txt", 700)):
        draw = torch.randint(len(words), (n,), generator=generator).tolist()
        (path / name).write_text(" ".join(words[i] for i in draw))
    return path


@pytest.fixture(scope="module")
def grid(home: Path) -> list[Any]:
    """The options of all runs here."""
    return ["--group-size", "16", "--calibration", home / "text.txt", *DATA]


@pytest.fixture(scope="module")
def checkpoint(home: Path, grid: list[Any]) -> Path:
    """A 3-bit checkpoint of the tiny model."""
    run("quantize", home / "m", home / "out", *grid, "--bits", 3, "-q")
    return home / "out"


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged."""
    return shutil.copytree(checkpoint, tmp_path / "copy")


def commands_of() -> Iterator[tuple[str, Any]]:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if name == "hessians":
            yield from ((f"{name} {part}", one) for part, one in command.commands.items())
        else:
            yield name, command


# 1. Surface


def test_help_and_version_import_nothing_heavy() -> None:
    script = (
        "import sys, bakron.cli\n"
        "for arguments in (['--help'], ['--version'], ['quantize', '--help'], ['compare', '--help'], ['plan', '--help']):\n"
        "    try:\n"
        "        bakron.cli.app(arguments)\n"
        "    except SystemExit as end:\n"
        "        assert not end.code\n"
        "heavy = {'torch', 'transformers', 'numba', 'numpy', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"bakron {bakron.__version__}" in done.stdout


def test_the_module_runs_as_the_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bakron", "--version"], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"bakron {bakron.__version__}\n"


def test_names_of_the_package_are_lazy_and_complete() -> None:
    for name in bakron.__all__:
        assert getattr(bakron, name).__name__ == name
        assert name in dir(bakron)
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        bakron.quantise  # noqa: B018


def test_every_command_and_option_has_help() -> None:
    names = set()
    for name, command in commands_of():
        names.add(name)
        assert command.help
        for parameter in command.params:
            assert parameter.help, f"{name} {parameter.name}"
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert {"--quiet"} <= flags, name
        assert ("--json" in flags) == (name in REPORTING), name
        assert name.split()[0] in run("--help").stdout
    assert names == REPORTING | {"collect", "solve", "transform"}


def test_options_are_the_fields_of_settings_with_their_types_and_defaults() -> None:
    fields = {field.name: field for field in dataclasses.fields(Settings) if field.name != "layers"}
    assert options.all_options().keys() == fields.keys()
    special = {"symmetric": "symmetric", "skip": "none", "calibration": "none", "hessians": "none"}
    for name, option in options.all_options().items():
        default = fields[name].default
        shown = special.get(name, "the method's" if default is None else str(default))
        assert option.default == shown, name
        for value in get_args(option.type) if option.type != list[str] else []:
            Settings(**{name: value})  # every choice offered is one
        if option.parser:
            assert Settings.load(**{name: option.parser(option.default)}) == Settings()
        elif default not in (None, ()):
            assert option.type is type(default) or default in get_args(option.type), name


@pytest.mark.parametrize("command", ["quantize", "collect"])
def test_every_setting_is_an_option_of(command: str) -> None:
    flags = {flag for p in dict(commands_of())[command].params for flag in p.opts}
    for field in dataclasses.fields(Settings):
        if field.name == "layers":  # tables of a recipe
            continue
        assert f"--{field.name.replace('_', '-')}" in flags


# 2. quantize and its stages


def test_quantize_writes_what_python_writes(
    home: Path, grid: list[Any], checkpoint: Path, tmp_path: Path
) -> None:
    record = bakron.quantize(
        home / "m",
        tmp_path / "out",
        bits=3,
        group_size=16,
        calibration=home / "text.txt",
        n_sequences=3,
        sequence_length=48,
    )
    assert record["sha256"] == json.loads((checkpoint / "bakron.json").read_text())["sha256"]
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()


def test_quantize_shows_a_plan_then_stages_then_a_table(home: Path, grid: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("quantize", home / "m", out, *grid, "--bits", 4, "--text", home / "held.txt", "--keep-work")
    order = ["memory", "disk", "time", "forward through", "solve (bakron, 4 bit)", "export", "Wrote"]
    places = [result.stderr.index(text) for text in order]
    assert places == sorted(places)
    assert "self_attn.q_proj" in result.stdout
    assert "perplexity" in result.stdout
    assert "memory" not in result.stdout
    assert (tmp_path / "out.work").is_dir()
    assert "perplexity after | not measured" not in (out / "README.md").read_text()


def test_quiet_says_nothing_and_json_is_the_record(home: Path, grid: list[Any], tmp_path: Path) -> None:
    result = run("quantize", home / "m", tmp_path / "a", "--method", "rtn", "--group-size", 16, "-q")
    assert (result.stdout, result.stderr) == ("", "")
    assert not (tmp_path / "a.work").exists()
    result = run("quantize", home / "m", tmp_path / "b", "--method", "rtn", "--group-size", 16, "--json")
    assert json.loads(result.stdout) == json.loads((tmp_path / "b" / "bakron.json").read_text())
    assert "no calibration data" in result.stderr


def test_options_win_over_the_recipe_and_reach_the_settings(home: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('bits = 5\nmethod = "rtn"\ngroup_size = 16\nsymmetric = false\nskip = ["q_proj"]\n')
    result = run("quantize", home / "m", tmp_path / "a", "--recipe", recipe, "--bits", 6, "-q", "--json")
    used = json.loads(result.stdout)["settings"]
    assert (used["bits"], used["group_size"], used["symmetric"], used["skip"]) == (6, 16, False, ["q_proj"])
    more = ["--symmetric", "--skip", "k_proj", "--skip", "v_proj", "--scale", "minmax", "--format", "dense"]
    result = run("quantize", home / "m", tmp_path / "b", "--recipe", recipe, *more, "-q", "--json")
    record = json.loads(result.stdout)
    used = record["settings"]
    assert (used["symmetric"], used["skip"], used["scale"]) == (True, ["k_proj", "v_proj"], "minmax")
    assert used["format"] == "dense"
    assert {name.rpartition(".")[2] for name in record["sha256"]} & {"q_proj", "k_proj"} == {"q_proj"}


def test_the_stages_write_the_same_bytes_from_any_directory(
    home: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    relative = ["--group-size", "16", "--calibration", "text.txt", *DATA]
    result = run("collect", "m", tmp_path / "w", *relative, "--bits", 4)
    assert f"bakron solve {tmp_path / 'w'}" in result.stderr
    monkeypatch.chdir(tmp_path)
    run("solve", "w", "--bits", 3, "-q")  # a setting of the solve may change after collecting
    assert "self_attn" in run("export", "w", "out").stdout
    for name in ("model.safetensors", "config.json", "bakron.json"):
        mine, theirs = (path / name for path in (tmp_path / "out", checkpoint))
        if name != "bakron.json":  # it holds seconds
            assert mine.read_bytes() == theirs.read_bytes()
        assert json.loads((tmp_path / "w" / JOB).read_text())["settings"]["bits"] == 3
    run("export", "w", "dense", "--format", "dense", "--text", home / "held.txt", "-q")
    assert run("verify", "dense", "--json").stdout.count("true") == 1
    assert json.loads((tmp_path / "dense" / "bakron.json").read_text())["quality"]["kl"] > 0


def test_stages_refuse_what_is_missing_or_was_made_otherwise(
    home: Path, grid: list[Any], tmp_path: Path
) -> None:
    work = tmp_path / "w"
    assert "bakron collect MODEL" in said(run("solve", work, code=2))
    assert not work.exists()
    run("collect", home / "m", work, *grid, "--method", "gptq", "-q")
    assert "2 of 2 blocks are not solved" in said(run("export", work, tmp_path / "out", code=2))
    before = (work / JOB).read_text()
    message = said(run("solve", work, "--method", "bakron", code=2))
    assert "estimator shampoo" in message
    assert "bakron collect" in message
    assert (work / JOB).read_text() == before
    run("solve", work, "-q")
    assert "bits = 4" in said(run("solve", work, "--bits", 2, code=2))
    assert (work / JOB).read_text() == before
    assert "seed = 0" in said(run("collect", home / "m", work, *grid, "--seed", 1, code=2))
    assert (work / JOB).read_text() == before
    run("export", work, tmp_path / "out", "-q")
    assert "not empty" in said(run("export", work, tmp_path / "out", code=2))
    run("export", work, tmp_path / "out", "--overwrite", "-q")


# 3. eval and compare


def test_eval_of_a_model_against_itself_is_perfect(home: Path) -> None:
    arguments = [home / "m", "--reference", home / "m", "--text", home / "held.txt", *HELD_OUT]
    result = json.loads(run("eval", *arguments, "--json", "-q").stdout)
    assert (result["kl"], result["kl_p99"], result["top1"]) == (0.0, 0.0, 1.0)
    assert result["perplexity"] == result["perplexity_reference"] > 1
    assert result["n_tokens"] == 3 * 39


def test_eval_without_a_reference_measures_perplexity_alone(home: Path) -> None:
    arguments = [home / "m", "--text", home / "held.txt", *HELD_OUT]
    result = json.loads(run("eval", *arguments, "--json", "-q").stdout)
    assert result["kl"] is None
    assert result["perplexity"] > 1
    shown = run("eval", *arguments).stdout
    assert f"{result['perplexity']:.4f}" in shown
    assert "KL" not in shown


def test_compare_agrees_with_quantize_and_eval(
    home: Path, grid: list[Any], checkpoint: Path, tmp_path: Path
) -> None:
    held_out = ["--eval-n-sequences", 3, "--eval-sequence-length", 40]
    common = [*grid, "--text", home / "held.txt", *held_out, "--work", tmp_path / "w"]
    methods = "rtn,gptq:inputs=static,bakron"
    result = run("compare", home / "m", "--methods", methods, "--bits", "3,4", *common, "--json", "-q")
    assert result.stderr == ""
    assert not (tmp_path / "w").exists()
    rows = {row["label"]: row for row in json.loads(result.stdout)}
    labels = [f"{m} {b} bit{rest}" for b in (3, 4) for m, rest in VARIANTS]
    assert list(rows) == ["original", *labels]
    assert rows["bakron 3 bit"]["kl"] > rows["bakron 4 bit"]["kl"] > 0
    arguments = [checkpoint, "--reference", home / "m", "--text", home / "held.txt", *HELD_OUT]
    measured = json.loads(run("eval", *arguments, "--json", "-q").stdout)
    for key in ("perplexity", "kl", "kl_p99", "top1", "n_tokens"):
        assert rows["bakron 3 bit"][key] == pytest.approx(measured[key], rel=1e-5), key
    assert rows["original"]["perplexity"] == measured["perplexity_reference"]


VARIANTS = [("rtn", ""), ("gptq", " inputs=static"), ("bakron", "")]


def test_compare_collects_once_and_keeps_work_when_asked(
    home: Path, grid: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["compare", home / "m", "--methods", "bakron,bakron:percdamp-out=1", *grid, "--keep-work"]
    result = run(*arguments, "--text", home / "held.txt", *EVAL)
    assert result.stderr.count("backward through") == 2  # the stage's first and last line
    assert result.stdout.count("bakron 4 bit") == 2
    assert (tmp_path / "m.compare.work" / "collected").is_dir()


EVAL = ["--eval-n-sequences", 2, "--eval-sequence-length", 40]


def test_variants_have_labels_changes_and_errors(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("bits = 6\ngroup_size = 32\n")
    made = make_variants(
        ["rtn", "gptq:aim=0.25:inputs=sequential"], [], recipe, estimator="kfac", calibration="x"
    )
    assert list(made) == ["rtn 6 bit", "gptq 6 bit aim=0.25 inputs=sequential"]
    rtn, gptq = made.values()
    assert (rtn.estimator_name, rtn.group_size, gptq.estimator_name, gptq.aim) == (
        "identity",
        32,
        "kfac",
        0.25,
    )
    assert [s.bits for s in make_variants(["rtn"], [2, 8]).values()] == [2, 8]
    for methods, message in (
        (["rtn", "rtn"], "listed twice"),
        (["gptq:aim"], "expected METHOD:setting=value"),
        (["gptq:bits=3"], "expected METHOD:setting=value"),
        (["gptq:aims=3"], "did you mean 'aim'"),
        (["gptq:aim=high"], "aim: 'high' is a str"),
        (["best"], "method: 'best'"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_variants(methods, [3])


def test_a_variant_may_have_a_recipe_of_its_own_with_its_own_bits(tmp_path: Path) -> None:
    recipe = tmp_path / "plan.toml"
    recipe.write_text("bits = 6\n[[layers]]\npattern = 'down_proj'\nbits = 8\n")
    own = f"gptq:recipe={recipe}:aim=0.5"
    made = make_variants(["rtn", own], [2, 3])
    assert list(made) == ["rtn 2 bit", "gptq mixed recipe=plan.toml aim=0.5", "rtn 3 bit"]
    gptq = made["gptq mixed recipe=plan.toml aim=0.5"]
    assert (gptq.bits, [rule.bits for rule in gptq.layers], gptq.aim) == (6, [8], 0.5)
    assert list(make_variants(["rtn", "gptq"], [], recipe)) == ["rtn mixed", "gptq mixed"]
    with pytest.raises(ConfigError, match=r"bits 3 is given, but \[\[layers\]\].*rtn:recipe="):
        make_variants(["rtn"], [3], recipe)


def test_transform_writes_a_dense_copy(home: Path, tmp_path: Path) -> None:
    result = run("transform", home / "m", tmp_path / "out", "--transform", "rotate+heads")
    assert "load" in result.stdout + result.stderr
    assert "fold+rotate+heads" in (tmp_path / "out" / "README.md").read_text()
    assert "all 16 new weights" in run("verify", tmp_path / "out").stdout
    error = said(run("transform", home / "m", tmp_path / "b", "--transform", "turn", code=2))
    assert "transform: 'turn' is not one of fold, rotate, heads, rescale" in error


# 4. verify


def test_verify_accepts_what_was_written(
    home: Path, grid: list[Any], checkpoint: Path, tmp_path: Path
) -> None:
    result = run("verify", checkpoint)
    assert "all 14 new weights load as they were made" in result.stdout
    assert result.stderr == ""
    run("quantize", home / "m", tmp_path / "a", *grid, "--asymmetric", "--skip", "v_proj", "-q")
    assert bakron.verify(tmp_path / "a")["layers"] == 12
    tiny_decoder("gpt2", tmp_path / "gpt2")
    arguments = ["--method", "rtn", "--group-size", 16, "--format", "dense", "-q"]
    run("quantize", tmp_path / "gpt2", tmp_path / "b", *arguments)
    assert bakron.verify(tmp_path / "b")["layers"] == 8


def change(directory: Path, key: str, how: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors[key] = how(tensors[key])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_verify_lists_exactly_the_layer_that_differs(copy: Path) -> None:
    def one_code(packed: Any) -> Any:
        packed[3, 0] ^= 1
        return packed

    change(copy, "model.layers.1.mlp.up_proj.weight_packed", one_code)
    message = said(run("verify", copy, code=2))
    assert "1 of 14 layers are not what was solved" in message
    assert "  model.layers.1.mlp.up_proj\n" in message
    assert message.count("model.layers.") == 1


def test_verify_finds_logits_that_are_not_finite(copy: Path) -> None:
    change(copy, "model.norm.weight", lambda weight: weight * torch.nan)
    with pytest.raises(NonFiniteError, match="the logits hold NaN"):
        bakron.verify(copy)


def test_verify_finds_missing_and_surplus_tensors(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing_keys: model\.norm\.weight"):
        bakron.verify(copy)
    save_file({**tensors, "model.norm.weight": norm, "extra": norm.clone()}, copy / "model.safetensors")
    with pytest.raises(ModelError, match="unexpected_keys: extra|cannot load"):
        bakron.verify(copy)


def test_verify_refuses_what_it_cannot_check(home: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no bakron.json" in said(run("verify", home / "m", code=2))
    record = json.loads((copy / "bakron.json").read_text())
    for text, message in (
        ("{", "not a record"),
        ("[]", "not a record"),
        ('{"sha256": {}}', "lists no layer"),
    ):
        (copy / "bakron.json").write_text(text)
        with pytest.raises(VerificationError, match=message):
            bakron.verify(copy)
    record["sha256"]["model.layers.7.mlp"] = "0"
    (copy / "bakron.json").write_text(json.dumps(record))
    with pytest.raises(VerificationError, match=r"1 of 15 layers .*\n  model\.layers\.7\.mlp \(absent\)"):
        bakron.verify(copy)
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:1000])
    assert "transformers cannot load it" in said(run("verify", copy, code=2))
    monkeypatch.setattr(reload_module, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"bakron\[compressed-tensors\]"):
        bakron.verify(copy)


# 5. Errors and interruptions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize", "absent/model/x", "OUT", "--calibration", "TEXT"], "no such directory"),
        (["quantize", "HOME", "OUT", "--calibration", "TEXT"], "no config.json"),
        (["quantize", "MODEL", "OUT"], "needs text"),
        (["quantize", "MODEL", "OUT", "--group-size", 16, "--calibration", "absent.txt"], "no such file"),
        (["quantize", "MODEL", "OUT", "--group-size", 16, "--calibration", "TEXT"], "Give more text"),
        (
            ["quantize", "MODEL", "OUT", "--calibration", "TEXT", "--group-size", 48],
            "does not divide d_in 32",
        ),
        (["quantize", "MODEL", "OUT", "--calibration", "TEXT", "--bits", 9], "from 2 to 8"),
        (["quantize", "MODEL", "OUT", "--calibration", "TEXT", "--skip", ".*"], "no linear layer is left"),
        (["quantize", "MODEL", "OUT", "--recipe", "absent.toml"], "no such file"),
        (["quantize", "MODEL", "HOME", "--method", "rtn"], "not empty"),
        (["quantize", "MODEL", "INSIDE", "--method", "rtn", "--group-size", 16], "Not a directory"),
        (["quantize", "MODEL", "OUT", "--method", "rtn", "--format", "gguff"], "unknown export format"),
        (["eval", "MODEL", "--text", "absent.txt"], "no such file"),
        (["eval", "absent/model/x", "--text", "TEXT"], "no such directory"),
        (["compare", "MODEL", "--text", "TEXT", "--bits", "3;4"], "'3;4' is not a whole number"),
        (["compare", "MODEL", "--text", "TEXT", "--methods", "rtn,best"], "method: 'best'"),
        (
            ["compare", "MODEL", "--text", "absent.txt", "--methods", "rtn", "--group-size", 16],
            "no such file",
        ),
        (
            ["compare", "MODEL", "--text", "TEXT", "--group-size", 16, "--calibration", "absent.txt"],
            "no such file",
        ),
        (["verify", "absent/model/x"], "no bakron.json"),
    ],
)
def test_bad_input_is_one_message_before_anything_is_written(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    place = {"HOME": home, "MODEL": home / "m", "OUT": tmp_path / "out", "TEXT": home / "text.txt"}
    place["INSIDE"] = place["TEXT"] / "out"
    result = run(*(place.get(argument, argument) for argument in arguments), code=2)
    assert message in said(result)
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


class Interrupting(Silent):
    """Somebody presses Ctrl-C after so many steps of a stage."""

    def __init__(self, label: str, steps: int) -> None:
        self.label, self.steps, self.here = label, steps, False

    def start(self, label: str, total: int) -> None:
        self.here = label.startswith(self.label)

    def advance(self, steps: int = 1) -> None:
        self.steps -= self.here
        if self.steps < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("label", "steps"), [("forward", 4), ("backward", 3), ("solve", 4), ("export", 5)])
def test_ctrl_c_loses_nothing(
    home: Path,
    grid: list[Any],
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    label: str,
    steps: int,
) -> None:
    arguments = ["quantize", home / "m", tmp_path / "out", *grid, "--bits", 3]
    with monkeypatch.context() as patch:
        patch.setattr(commands, "listener", lambda quiet: Interrupting(label, steps))
        result = run(*arguments, code=130)
    assert f"Finished work is kept in {tmp_path / 'out.work'}; run the same command again" in result.stderr
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out.work"]
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("factors/*/*.safetensors")}
    run(*arguments, "-q", "--keep-work")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (
        checkpoint / "model.safetensors"
    ).read_bytes()
    assert all(path.stat().st_mtime_ns == time for path, time in finished.items())


def test_ctrl_c_where_nothing_is_kept_says_so_little(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "listener", lambda quiet: Interrupting("evaluate", 1))
    result = run("eval", home / "m", "--text", home / "held.txt", *HELD_OUT, code=130)
    assert result.stderr.strip() == "Interrupted."


# 6. demo and progress


def test_the_demo_compares_writes_and_verifies(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text(out: Path) -> Path:
        out.mkdir(exist_ok=True)
        for name, source in (("calibration", "text.txt"), ("heldout", "held.txt")):
            line = json.dumps({"text": (home / source).read_text()})
            (out / f"{name}.jsonl").write_text(line + "\n")
        return out

    monkeypatch.setattr(demonstration, "prepare_smollm2", lambda out: home / "m")
    monkeypatch.setattr(demonstration, "prepare_wikipedia", text)
    sizes = {"GROUP_SIZE": 16, "N_SEQUENCES": 3, "SEQUENCE_LENGTH": 48, "N_HELD_OUT": 3}
    for name, value in sizes.items():
        monkeypatch.setattr(demonstration, name, value)
    (tmp_path / "d").mkdir()
    result = run("demo", tmp_path / "d")
    for method in ("rtn", "gptq", "bakron"):
        assert f"{method} {demonstration.BITS} bit" in result.stdout
    out = next((tmp_path / "d").glob("smollm2-bakron-*"))
    assert str(out) in result.stderr
    assert bakron.verify(out)["layers"] == 14
    assert not list((tmp_path / "d").glob("*.work"))
    rows = json.loads(run("demo", tmp_path / "d", "--json", "-q").stdout)
    quality = json.loads((out / "bakron.json").read_text())["quality"]
    assert rows[-1]["kl"] == quality["kl"]
    assert rows[0]["perplexity"] == quality["perplexity_before"]


def test_lines_tell_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    lines = console.Lines()
    lines.start("solve", 10)
    for _ in range(10):
        now[0] += 45
        lines.advance()
    lines.finish()
    for _ in range(2):
        lines.note("few tokens")
    captured = capsys.readouterr()
    assert captured.out == ""
    expected = ["solve ...", "solve: 2 of 10, 6 min left", "solve: 4 of 10, 4 min left"]
    assert captured.err.splitlines()[:3] == expected
    assert captured.err.splitlines()[-2:] == ["solve: 10 of 10 in 8 min", "note: few tokens"]


def test_bars_go_to_stderr_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")
    bars = console.Bars()
    bars.start("solve", 4)
    bars.advance(3)
    bars.finish()
    bars.advance()  # nothing is running
    for _ in range(2):
        bars.note("few tokens")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "solve" in captured.err
    assert "3/4" in captured.err
    assert "left" in captured.err
    assert captured.err.count("few tokens") == 1


def test_sizes_and_times_are_readable() -> None:
    assert [console.size(n) for n in (340_000, 99_000_000, 100_000_000, 6_000_000_000)] == [
        "0.34 MB",
        "99.00 MB",
        "0.10 GB",
        "6.00 GB",
    ]
    assert [console.duration(s) for s in (1.25, 59.0, 90.0, 7200.0)] == ["1.2 s", "59.0 s", "2 min", "2.0 h"]
