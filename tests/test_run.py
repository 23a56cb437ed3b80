"""Claims about a run: what is solved is what was asked for, nothing is lost, and bad input is refused before work starts.

1. Solve: the problem of every linear, sequential or static, is that of an independent computation on entire models.
2. Methods: gptq is bakron without H_out; rtn is round to nearest; the same seed gives the same bytes.
3. Resume: a run killed at any moment and run again writes identical files; changed settings are refused by name.
4. Input: pads do not count; texts of different lengths; bad input gives one named error and leaves nothing behind.
5. End to end: for every family and scheme, what transformers loads is what was solved.
6. Plan and progress: one block's factors in memory, no more disk than planned, every stage counts to its end.

Kinds: oracle, property, regression, behaviour.
"""

from __future__ import annotations

import errno
import gc
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from autograd_oracle import Observed, assert_near, load_whole, observe, sampled_labels, set_weight
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, TINY_VOCAB, tiny_decoder, tiny_tokenizer
from torch import Tensor

from bakron.core.noise import damping_for, relative_error
from bakron.core.solution import LayerProblem, Solution, solve_problem
from bakron.core.target import aimed_weight
from bakron.errors import (
    BakronError,
    ConfigError,
    DataError,
    DiskSpaceError,
    FormatError,
    ModelError,
    NonFiniteError,
    OutputExistsError,
    ResumeError,
    ShapeError,
    WorkInUseError,
)
from bakron.models import load_decoder
from bakron.models.residual import GAIN_FLOOR
from bakron.run.allocate import plan
from bakron.run.collect import factors
from bakron.run.compare import compare
from bakron.run.factors import unpacked
from bakron.run.pipeline import Job, quantize
from bakron.run.progress import Progress, Silent
from bakron.run.settings import Settings
from bakron.run.solve import TOKEN_WEIGHT_LIMIT
from bakron.run.stages import collect, solve
from bakron.run.store import Store, held, require_space

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "wizards", "play"]
BASE: dict[str, Any] = {
    "bits": 3,
    "group_size": 16,
    "n_sequences": 3,
    "sequence_length": 20,
    "format": "dense",
}


def words(n: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=n))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of models (made on first use) and of calibration texts."""
    path = tmp_path_factory.mktemp("shared")
    (path / "text.txt").write_text(words(60, 0))
    (path / "other.txt").write_text(words(60, 1))
    lines = [json.dumps({"text": words(9, i)[: 9 + 4 * i]}) for i in range(5)]
    (path / "texts.jsonl").write_text("\n".join(lines) + "\n")
    return path


def model_of(shared: Path, family: str = "llama", **options: Any) -> Path:
    path = shared / "-".join([family, *(f"{key}-{value}" for key, value in options.items())])
    return path if path.exists() else tiny_decoder(family, path, tokenizer=True, **options)


@pytest.fixture(scope="module")
def llama(shared: Path) -> Path:
    return model_of(shared)


@pytest.fixture(scope="module")
def text(shared: Path) -> Path:
    return shared / "text.txt"


@pytest.fixture(scope="module")
def whole_run(shared: Path, llama: Path, text: Path) -> Path:
    """The output of an uninterrupted run, beside its work directory ``whole.work``."""
    out = shared / "outputs" / "whole"
    quantize(llama, out, calibration=text, keep_work=True, **BASE)
    return out


def job_of(
    model: Path, work: Path, calibration: Path | None, progress: Progress | None = None, **settings: Any
) -> Job:
    """A job through its first two stages."""
    chosen = {**BASE, **settings, "calibration": None if calibration is None else str(calibration)}
    job = Job(str(model), Settings.load(None, **chosen), work, progress or Silent())
    job.collect()
    job.solve()
    return job


def pieces(work: Path) -> dict[str, Tensor]:
    """All codes, scales and zeros of a work directory, read without bakron."""
    files = sorted((work / "solved" / "solved").glob("*.safetensors"))
    assert files
    return {key: value for file in files for key, value in load_file(file).items()}


def dense_of(solved: dict[str, Tensor], name: str) -> Tensor:
    """The weight that the codes of ``name`` stand for, by the formula of the formats, in the dtype of the scale."""
    codes, scale, zero = (solved[f"{name}.{key}"] for key in ("codes", "scale", "zero"))
    size = codes.shape[1] // scale.shape[1]
    steps = codes.int() - zero.int().repeat_interleave(size, 1)
    return scale.repeat_interleave(size, 1) * steps.to(scale.dtype)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


def assert_identical(seen: Path, expected: Path) -> None:
    a, b = contents(seen), contents(expected)
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] != b[name]] == []


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> dict[str, LayerProblem]:
    """Every problem that a run solves, by the name of its linear."""
    seen: dict[str, LayerProblem] = {}

    def recorded(problem: LayerProblem, *args: Any, **options: Any) -> Solution:
        seen[problem.name] = problem
        return solve_problem(problem, *args, **options)

    monkeypatch.setattr("bakron.run.solve.solve_problem", recorded)
    return seen


class Listener(Silent):
    """Calls ``on_advance`` at every step, and keeps what was said."""

    def __init__(self, on_advance: Callable[[int], None] = lambda count: None) -> None:
        self.on_advance, self.count = on_advance, 0
        self.stages: list[list[Any]] = []
        self.notes: list[str] = []

    def start(self, label: str, total: int) -> None:
        self.stages.append([label, total, 0, False])

    def advance(self, steps: int = 1) -> None:
        self.stages[-1][2] += steps
        self.count += 1
        self.on_advance(self.count)

    def finish(self) -> None:
        self.stages[-1][3] = True

    def note(self, message: str) -> None:
        self.notes.append(message)


# 1. Solve


def observed(model: Any, job: Job, names: list[str], *, seed: int | None = None) -> list[dict[str, Observed]]:
    return [
        observe(model, ids, names, None if seed is None else sampled_labels(model, ids, seed, index))
        for index, ids in enumerate(job.sequences)
    ]


def normalised(H: Tensor | None) -> Tensor:
    """H over its trace: the scale of a factor has no meaning."""
    assert H is not None
    return H.double() / H.double().trace()


def total(terms: Iterator[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum(0)


# of each family: the parts of a block whose inputs are taken at the same time, the linears that write to the
# hidden state, and the norms that their outputs pass first
PARTS = {
    "llama": (("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")),
    "gpt2": (("attn.c_attn", "attn.c_proj"), ("mlp.c_fc", "mlp.c_proj")),
}
PARTS["gemma2"] = PARTS["llama"]
WRITERS = {
    "llama": ("o_proj", "down_proj"),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "gemma2": ("o_proj", "down_proj"),
}
NORMS = {
    "self_attn.o_proj": "post_attention_layernorm",
    "mlp.down_proj": "post_feedforward_layernorm",
}


@pytest.mark.parametrize(
    ("family", "estimator"),
    [("llama", "shampoo"), ("gpt2", "shampoo"), ("gemma2", "shampoo"), ("llama", "gram")],
)
def test_a_sequential_problem_is_that_of_the_quantized_prefix(
    shared: Path, tmp_path: Path, problems: dict[str, LayerProblem], family: str, estimator: str
) -> None:
    """H_in = Σ w x̂x̂ᵀ, and the weights of those that write to the hidden state aimed at the original one's, by a whole
    model in which everything before the part is quantized."""
    path, aim, percdamp = model_of(shared, family), 0.7, 0.02
    job = job_of(
        path, tmp_path, shared / "texts.jsonl", estimator=estimator, seed=5, sampling="per-sample", aim=aim,
        percdamp_aim=percdamp, percdamp_out=2.0,
    )  # fmt: skip
    assert len({len(ids) for ids in job.sequences}) > 1
    original, prefix = load_whole(path), load_whole(path)
    names = [spec.name for spec in job.flat_targets]
    before = observed(original, job, names, seed=5)
    for b, part in ((b, part) for b in range(2) for part in PARTS[family]):
        now = observed(prefix, job, names)
        chosen = [name for name in names if f".{b}." in name and name.endswith(part)]
        for name in chosen:
            x = [seen[name].x for seen in now]
            w = token_weights([seen[name].g for seen in before]) if estimator == "shampoo" else [1.0] * len(x)
            H = total(xs.T @ (ws * xs) for xs, ws in zip(x, w, strict=True))
            assert_near(normalised(problems[name].H_in), normalised(H))
            W = load_whole_weight(original, job, name)
            if name.endswith(WRITERS[family]):
                goal, reached = (
                    [
                        written(model, ids, b, name, seen, WRITERS[family])
                        for ids, seen in zip(job.sequences, of, strict=True)
                    ]
                    for model, of in ((original, before), (prefix, now))
                )
                r = [
                    change_of(prefix, name, seen[name].y, y - z)
                    for seen, y, z in zip(now, goal, reached, strict=True)
                ]
                cross = total((ws * rs).T @ xs for xs, ws, rs in zip(x, w, r, strict=True))
                damped = H + percdamp * H.diagonal().diag()
                W = W + aim * torch.linalg.solve(damped, cross.T).T
            assert_near(problems[name].weight, W, 3e-4 if name.endswith(WRITERS[family]) else 1e-7)
            if estimator == "gram":
                assert problems[name].H_out is None
            else:
                G = [seen[name].G for seen in before]
                assert_near(normalised(problems[name].H_out), normalised(total(g @ g.T for g in G)))
        for name in chosen:
            set_weight(prefix, name, job.decoder.get_weight(name))
    final = job.decoder.model.state_dict()
    assert all(torch.equal(value, final[key]) for key, value in prefix.state_dict().items())


def test_local_factors_meet_inputs_of_the_quantized_prefix(
    llama: Path, text: Path, tmp_path: Path, problems: dict[str, LayerProblem]
) -> None:
    """H_out as collected; H_in of x̂, weighted where the estimator has weights (v) and else not (q and k beside it)."""
    job = job_of(llama, tmp_path, text, estimator="attention_local", aim=0.0)
    stored = unpacked(load_file(tmp_path / "collected/factors/attention_local/0000.safetensors"))
    assert not any(key.endswith(".H_in") for key in stored)
    seen = observed(
        load_whole(llama), job, [spec.name for spec in job.flat_targets]
    )  # block 0 sees no error before it
    for end in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.0.self_attn.{end}"
        x = torch.cat([s[name].x for s in seen])
        w = torch.ones(len(x), 1)
        if end == "v_proj":
            w = stored[f"{name}.token_weights"][:, None]
            w = w.clamp(max=TOKEN_WEIGHT_LIMIT * float(w.median()))
        assert_near(normalised(problems[name].H_in), normalised(x.T @ (w * x)))
        assert_near(problems[name].H_out, stored[f"{name}.H_out"], 1e-6)
    assert problems["model.layers.0.self_attn.o_proj"].H_out is None
    for key, H_out in stored.items():
        if key.endswith("_proj.H_out"):
            assert_near(problems[key.removesuffix(".H_out")].H_out, H_out, 1e-6)


def token_weights(g: list[Tensor]) -> list[Tensor]:
    """‖g_t‖² (T, 1) of each sequence, at most so many times the median of those above zero."""
    w = [gs.square().sum(1, keepdim=True) for gs in g]
    typical = torch.cat([ws[ws > 0] for ws in w]).median()
    return [ws.clamp(max=TOKEN_WEIGHT_LIMIT * float(typical)) for ws in w]


def written(
    model: Any, ids: Tensor, b: int, name: str, seen: dict[str, Observed], writers: tuple[str, ...]
) -> Tensor:
    """The hidden state (T, d) after the output of linear ``name`` was added to it."""
    with torch.no_grad():
        h = model(ids[None], use_cache=False, output_hidden_states=True).hidden_states[b][0].double()
    for other in (other for other in seen if f".{b}." in other and other.endswith(writers)):
        h = h + normed(model, other, seen[other].y)
        if other == name:
            return h
    raise AssertionError(name)


def normed(model: Any, name: str, y: Tensor) -> Tensor:
    """What the output y of linear ``name`` adds to the hidden state."""
    block = name.rsplit(".", 2)[0]
    norms = dict(model.get_submodule(block).named_children())
    if "post_feedforward_layernorm" not in norms:
        return y
    with torch.no_grad():
        return norms[NORMS[name.removeprefix(f"{block}.")]](y.float()).double()


def change_of(model: Any, name: str, y: Tensor, missed: Tensor) -> Tensor:
    """The change of the output y of linear ``name`` that is to make up for ``missed`` in the hidden state."""
    z = normed(model, name, y)
    if z is y:
        return missed
    D = z / y
    change = D * missed / (D**2 + (GAIN_FLOOR * D.abs().median(1, keepdim=True).values) ** 2)
    u = y / y.norm(dim=1, keepdim=True)
    return change - (change * u).sum(1, keepdim=True) * u


def load_whole_weight(model: Any, job: Job, name: str) -> Tensor:
    weight = model.get_submodule(name).weight.detach().double()
    transposed = next(spec.transposed for spec in job.flat_targets if spec.name == name)
    return weight.T if transposed else weight


@pytest.mark.parametrize("estimator", ["gram", "shampoo"])
def test_sequential_sums_have_float32_precision_whatever_the_dtype_of_the_model(
    llama: Path, text: Path, tmp_path: Path, problems: dict[str, LayerProblem], estimator: str
) -> None:
    job_of(llama, tmp_path, text, estimator=estimator, dtype="bfloat16", n_sequences=1, aim=1.0)
    for name, problem in problems.items():
        H = problem.H_in
        assert H is not None and bool((H.bfloat16().double() != H).any()), (
            f"{name}: the precision of bfloat16"
        )


def test_aim_0_solves_the_weight_itself(
    llama: Path, text: Path, tmp_path: Path, problems: dict[str, LayerProblem]
) -> None:
    job = job_of(llama, tmp_path, text, aim=0.0)
    whole = load_whole(llama)
    for spec in job.flat_targets:
        assert torch.equal(problems[spec.name].weight, whole.get_submodule(spec.name).weight)


def test_an_unquantized_prefix_moves_no_target(
    llama: Path, text: Path, tmp_path: Path, problems: dict[str, LayerProblem]
) -> None:
    job = job_of(llama, tmp_path, text, aim=1.0, skip=[r"layers\.0\.", "self_attn"])
    whole = load_whole(llama)
    assert [spec.name for spec in job.flat_targets] == list(problems) and len(problems) == 3
    for name, problem in problems.items():
        assert torch.equal(problem.weight, whole.get_submodule(name).weight)


def test_a_quantized_prefix_moves_what_writes_to_the_hidden_state(
    llama: Path, text: Path, tmp_path: Path, problems: dict[str, LayerProblem]
) -> None:
    """The first attention has nothing to repair yet."""
    job_of(llama, tmp_path, text, aim=1.0)
    whole = load_whole(llama)
    moved = {n for n, p in problems.items() if not torch.equal(p.weight, whole.get_submodule(n).weight)}
    assert moved == {
        f"model.layers.{name}" for name in ("0.mlp.down_proj", "1.self_attn.o_proj", "1.mlp.down_proj")
    }


def test_an_aimed_model_drifts_less_from_the_original(llama: Path, text: Path, tmp_path: Path) -> None:
    """Measured where it was fitted: the hidden states that leave the last block, on the calibration text."""
    drift = {}
    for aim in (0.0, 1.0):
        job = job_of(llama, tmp_path / str(aim), text, method="gptq", aim=aim)
        whole = load_decoder(llama)
        drift[aim] = sum(
            float((seen - own).square().sum())
            for seen, own in zip(*(d.hidden_states(job.sequences) for d in (job.decoder, whole)), strict=True)
        )
    assert drift[1.0] < 0.6 * drift[0.0]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("method", "estimator"), [("gptq", "gram"), ("bakron", "kfac"), ("bakron", "shampoo")]
)
def test_a_static_problem_is_that_of_the_original_model(
    shared: Path,
    text: Path,
    tmp_path: Path,
    problems: dict[str, LayerProblem],
    family: str,
    method: str,
    estimator: str,
) -> None:
    """For every linear, also those whose H_in is stored once for the whole group."""
    path = model_of(shared, family)
    job = job_of(
        path, tmp_path, text, method=method, estimator=estimator, inputs="static", seed=2, percdamp_out=2.0
    )
    whole = load_whole(path)
    seen = observed(whole, job, [spec.name for spec in job.flat_targets], seed=2)
    for spec in job.flat_targets:
        problem, parts = problems[spec.name], [s[spec.name] for s in seen]
        assert_near(problem.weight, load_whole_weight(whole, job, spec.name), 1e-7)
        sides = {
            "gram": (lambda p: p.x.T @ p.x, None),
            "kfac": (lambda p: p.x.T @ p.x, lambda p: p.g.T @ p.g),
            "shampoo": (lambda p: p.G.T @ p.G, lambda p: p.G @ p.G.T),
        }[estimator]
        assert_near(normalised(problem.H_in), normalised(total(map(sides[0], parts))))
        if sides[1] is None:
            assert problem.H_out is None
        else:
            assert_near(normalised(problem.H_out), normalised(total(map(sides[1], parts))))


@hypothesis_settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 30), st.integers(0, 10**6))
def test_aim_1_minimises_the_weighted_distance_to_the_goal(m: int, n: int, more: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = 2 * n + more

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    W, goal, X, w = draw(m, n), draw(tokens, m), draw(tokens, n), draw(tokens).square()
    H = X.T @ (w[:, None] * X)
    cross = (w[:, None] * (goal - X @ W.T)).T @ X
    root = w.sqrt()[:, None]
    best = torch.linalg.lstsq(root * X, root * goal).solution.T
    torch.testing.assert_close(aimed_weight(W, cross, H, 0.0, 1.0, "layer"), best, rtol=1e-6, atol=1e-6)
    half = aimed_weight(W, cross, H, 0.0, 0.5, "layer")
    torch.testing.assert_close(half, (W + best) / 2, rtol=1e-6, atol=1e-6)
    assert torch.equal(aimed_weight(W, cross, H, 0.01, 0.0, "layer"), W)
    assert torch.equal(aimed_weight(W, torch.zeros_like(cross), H, 0.01, 1.0, "layer"), W)


def test_the_aim_does_not_depend_on_the_size_of_any_input() -> None:
    generator = torch.Generator().manual_seed(0)
    W, cross, x = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 5), (3, 5), (40, 5))
    )
    size = torch.tensor(
        [1e4, 1.0, 1e-3, 2.0, 1.0], dtype=torch.float64
    )  # of the same layer, inputs in other units
    aimed = aimed_weight(W, cross, x.T @ x, 1.0, 1.0, "layer")
    other = aimed_weight(W / size, cross * size, (x * size).T @ (x * size), 1.0, 1.0, "layer")
    torch.testing.assert_close(other * size, aimed, rtol=1e-9, atol=1e-9)


def test_an_aim_with_a_bad_hessian_names_the_layer() -> None:
    W = torch.ones(2, 3)
    with pytest.raises(ShapeError, match=r"q_proj: H_in"):
        aimed_weight(W, W, torch.eye(2), 0.01, 1.0, "q_proj")
    with pytest.raises(NonFiniteError, match=r"q_proj: H_in"):
        aimed_weight(W, W, torch.eye(3) * torch.nan, 0.01, 1.0, "q_proj")


# 2. Methods


@pytest.mark.parametrize("inputs", ["static", "sequential"])
@pytest.mark.parametrize("aim", [0.0, 0.5])
def test_bakron_with_gram_is_gptq(llama: Path, text: Path, tmp_path: Path, inputs: str, aim: float) -> None:
    runs = {}
    for method in ("gptq", "bakron"):
        job_of(llama, tmp_path / method, text, method=method, estimator="gram", inputs=inputs, aim=aim)
        runs[method] = pieces(tmp_path / method)
    assert runs["gptq"].keys() == runs["bakron"].keys()
    assert all(torch.equal(value, runs["bakron"][key]) for key, value in runs["gptq"].items())


@pytest.mark.parametrize("estimator", ["gram", "shampoo"])
def test_gptq_has_no_output_factor_whatever_the_estimator(
    llama: Path, text: Path, tmp_path: Path, problems: dict[str, LayerProblem], estimator: str
) -> None:
    job_of(llama, tmp_path, text, method="gptq", estimator=estimator)
    assert len(problems) == 14 and all(p.H_out is None and p.H_in is not None for p in problems.values())


@pytest.mark.parametrize("inputs", ["sequential", "static"])
def test_damping_that_is_chosen_is_that_of_each_layers_noise(
    llama: Path, text: Path, tmp_path: Path, problems: dict[str, LayerProblem], inputs: str
) -> None:
    """Three sequences: in some layers H_out is as uncertain as it is large, and these are solved as GPTQ would."""
    job = job_of(llama, tmp_path, text, inputs=inputs)
    one_sided = 0
    for row in job.report():
        problem = problems[row["name"]]
        b = int(row["name"].split(".")[2])
        piece = factors(job.need, b)
        H = unpacked(job.collected.load(piece))[f"{row['name']}.H_out"]
        squares = job.collected.metadata(piece)["squares_out"][row["name"]]
        expected = damping_for(H, relative_error(H, squares, 3))
        assert row["error_out"] == relative_error(H, squares, 3)
        one_sided += problem.H_out is None
        assert (problem.H_out is None) == math.isinf(expected)
        assert row["percdamp"][1] == (None if math.isinf(expected) else pytest.approx(expected))
    assert one_sided < len(problems)


def test_noise_alone_is_rounded_as_gptq_rounds(llama: Path, text: Path, tmp_path: Path) -> None:
    """One sequence says nothing of its own noise."""
    settings = {"estimator": "shampoo", "aim": 0.0, "n_sequences": 1, "sequence_length": 60}
    listener = Listener()
    job_of(llama, tmp_path / "auto", text, listener, **settings)
    assert any(note.startswith("One calibration sequence says nothing") for note in listener.notes)
    job_of(llama, tmp_path / "gptq", text, method="gptq", **settings)
    auto, gptq = pieces(tmp_path / "auto"), pieces(tmp_path / "gptq")
    assert all(torch.equal(value, gptq[key]) for key, value in auto.items())


@pytest.mark.parametrize("symmetric", [True, False])
def test_rtn_is_the_nearest_code_of_every_layer_and_needs_no_text(
    llama: Path, tmp_path: Path, symmetric: bool
) -> None:
    job = job_of(llama, tmp_path, None, method="rtn", symmetric=symmetric)
    solved, whole = pieces(tmp_path), load_whole(llama)
    assert len(job.flat_targets) == 14 and not (tmp_path / "collected").exists()
    for spec in job.flat_targets:
        codes, scale, zero = (solved[f"{spec.name}.{key}"] for key in ("codes", "scale", "zero"))
        position = whole.get_submodule(spec.name).weight.detach() / scale.repeat_interleave(16, 1)
        nearest = (position + zero.repeat_interleave(16, 1)).round().clamp(-4, 3)
        assert torch.equal(codes.float(), nearest)
        assert bool(zero.any()) is not symmetric


def test_methods_differ_and_each_wins_in_its_own_metric(
    llama: Path, text: Path, tmp_path: Path, problems: dict[str, LayerProblem]
) -> None:
    """Static, so that all round the same weights; the loss of the two-sided metric falls from rtn to gptq to bakron."""
    dense = {}
    for method in ("rtn", "gptq", "bakron"):
        job = job_of(llama, tmp_path / method, text, method=method, inputs="static", percdamp_out=0.1)
        solved = pieces(tmp_path / method)
        dense[method] = {spec.name: dense_of(solved, spec.name) for spec in job.flat_targets}
    loss = {
        method: sum(
            problems[name].loss(weight) / problems[name].loss(dense["rtn"][name])
            for name, weight in of.items()
        )
        for method, of in dense.items()
    }
    assert loss["bakron"] < 0.9 * loss["gptq"] < 0.9 * loss["rtn"]


def test_the_decoder_ends_up_with_the_solved_weights(llama: Path, text: Path, tmp_path: Path) -> None:
    job = job_of(llama, tmp_path, text)
    solved = pieces(tmp_path)
    for spec in job.flat_targets:
        assert torch.equal(job.decoder.get_weight(spec.name), dense_of(solved, spec.name))


def test_the_report_has_a_row_for_every_linear(llama: Path, text: Path, tmp_path: Path) -> None:
    job = job_of(llama, tmp_path, text)
    report = job.report()
    assert [row["name"] for row in report] == [spec.name for spec in job.flat_targets]
    H = {}
    for b in range(job.decoder.n_blocks):
        H |= unpacked(job.collected.load(factors(job.need, b)))
    for row in report:
        assert row["n_sequences"] == 3 and row["n_tokens"] == 60
        values = torch.linalg.eigvalsh(H[f"{row['name']}.H_out"].double())
        assert row["rank_out"] == pytest.approx(float(values.sum() ** 2 / values.square().sum()))
        assert (
            0 <= row["loss"] < row["loss_rtn"]
            and max(row["certificate"]) < 1e-4
            and 0 <= row["clip_rate"] < 1
        )


def test_a_wrong_kernel_is_caught_by_the_certificate(
    llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(problem: LayerProblem, *args: Any, **options: Any) -> Any:
        solution = solve_problem(problem, *args, **options)
        return SimpleNamespace(certificate=type(solution.certificate)(0.3, -0.5), codes=solution.codes)

    monkeypatch.setattr("bakron.run.solve.solve_problem", wrong)
    with pytest.raises(ArithmeticError, match=r"q_proj.*0\.3"):
        job_of(llama, tmp_path, text)


# 3. Resume


def test_the_same_seed_gives_the_same_bytes(llama: Path, text: Path, tmp_path: Path, whole_run: Path) -> None:
    quantize(llama, tmp_path / "again", calibration=text, **BASE)
    assert_identical(tmp_path / "again", whole_run)
    assert not (tmp_path / "again.work").exists()


def test_another_seed_draws_other_data(llama: Path, text: Path, tmp_path: Path, whole_run: Path) -> None:
    quantize(llama, tmp_path / "other", calibration=text, seed=1, **BASE)
    name = "model.safetensors"
    assert (tmp_path / "other" / name).read_bytes() != (whole_run / name).read_bytes()


class Death(BaseException):
    """Stands for the end of the process: nothing may catch it and go on."""


METHODS: dict[str, dict[str, Any]] = {
    "bakron": {},
    "static gptq": {"method": "gptq", "inputs": "static"},
    "rtn": {"method": "rtn"},
    "static token": {"estimator": "token", "inputs": "static", "labels": "data"},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("moment", ["after a file appears", "before the next one does"])
def test_death_around_every_file_and_a_rerun_give_identical_bytes(
    llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, moment: str
) -> None:
    """Runs that die one or two files later than the last one did, until one is not stopped any more."""
    options = {**BASE, **METHODS[method], "calibration": text}
    quantize(llama, tmp_path / "expected", **options)
    publish, deaths = os.replace, 0
    published: list[str] = []

    def replace(source: Any, target: Any) -> None:
        allowed = 1 + deaths % 2  # a step that writes two files is done over when only one of them is there
        if moment.startswith("before") and len(published) == allowed:
            raise Death
        publish(source, target)
        published.append(str(target))
        if moment.startswith("after") and len(published) == allowed:
            raise Death

    monkeypatch.setattr("os.replace", replace)
    for _ in range(40):
        published.clear()
        try:
            quantize(llama, tmp_path / "out", **options)
            break
        except Death:
            deaths += 1
            assert not (tmp_path / "out").exists()
    assert deaths >= {"bakron": 7, "static gptq": 5, "rtn": 1, "static token": 9}[method]
    assert_identical(tmp_path / "out", tmp_path / "expected")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "out"]


def test_finished_pieces_are_not_made_again(llama: Path, text: Path, tmp_path: Path) -> None:
    """A second run over a finished work directory changes no file in it."""
    options = {**BASE, "calibration": text, "work": tmp_path / "work", "keep_work": True}
    quantize(llama, tmp_path / "one", **options)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*.safetensors")}
    listener = Listener()
    quantize(llama, tmp_path / "two", progress=listener, **options)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*.safetensors")}
    assert before == after and len(before) >= 7
    assert_identical(tmp_path / "two", tmp_path / "one")
    assert all(done == total for _, total, done, _ in listener.stages)


def _killed_run(model: Path, text: Path, out: Path) -> None:
    """The body of a process that will be killed."""
    quantize(model, out, calibration=text, **BASE)


@pytest.mark.slow
def test_kill_9_at_random_moments_and_a_rerun_give_identical_bytes(
    shared: Path, text: Path, tmp_path: Path
) -> None:
    """Processes killed as soon as another file or two have appeared in the work directory, or a little later."""
    model, out, chance, kills = model_of(shared, num_hidden_layers=6), tmp_path / "out", random.Random(7), 0
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["test_run", "transformers.models.llama.modeling_llama", "bakron.kernels.numba"]
    )
    for _ in range(8):
        process = context.Process(target=_killed_run, args=(model, text, out))
        wait_for, delay = files_in(tmp_path) + chance.randint(1, 4), chance.choice([0, 0, 0.003, 0.01])
        process.start()
        while process.is_alive() and files_in(tmp_path) < wait_for:
            time.sleep(0.0005)
        time.sleep(delay)
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -9
        kills += 1
    assert kills >= 2
    if not out.exists():
        quantize(model, out, calibration=text, **BASE)
    quantize(model, tmp_path / "expected", calibration=text, **BASE)
    assert_identical(out, tmp_path / "expected")


RUNS: dict[str, Callable[[Path, Path, Path], object]] = {
    "quantize": lambda model, text, work: quantize(
        model, work.with_name("out"), work=work, calibration=text, **BASE
    ),
    "collect": lambda model, text, work: collect(model, work, calibration=str(text), **BASE),
    "solve": lambda model, text, work: solve(work),
    "compare": lambda model, text, work: compare(
        str(model),
        {"a": Settings(calibration=str(text), **BASE)},
        text,
        work,
        n_sequences=2,
        sequence_length=20,
    ),
    "plan": lambda model, text, work: plan(
        model,
        work.with_name("out.toml"),
        work=work,
        calibration=str(text),
        bpw=4.2,
        group_sizes=[16],
        n_sequences=3,
        sequence_length=20,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_second_run_in_one_work_directory_is_refused(
    llama: Path, text: Path, tmp_path: Path, name: str
) -> None:
    work = tmp_path / "work"
    if name == "solve":
        collect(llama, work, calibration=str(text), **BASE)
    with held(work):
        before = contents(work)
        with pytest.raises(WorkInUseError, match="work: another run is working there"):
            RUNS[name](llama, text, work)
        assert contents(work) == before
    RUNS[name](llama, text, work)
    assert not (work / "lock").exists()


def _holding(work: Path) -> None:
    with held(work):
        os.kill(os.getpid(), 9)


def test_a_killed_process_lets_go_of_its_work_directory(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_holding, args=(tmp_path / "work",))
    process.start()
    process.join()
    assert process.exitcode == -9 and (tmp_path / "work/lock").exists()
    with held(tmp_path / "work"):
        pass
    assert not (tmp_path / "work").exists()


def files_in(directory: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(directory))


@pytest.mark.parametrize("stage", range(5))
def test_ctrl_c_loses_nothing(llama: Path, text: Path, tmp_path: Path, whole_run: Path, stage: int) -> None:
    """Interrupted in the middle of each stage; the rerun takes up what was finished."""

    def interrupt(count: int) -> None:
        if len(listener.stages) == stage + 1 and listener.stages[-1][2] > listener.stages[-1][1] // 2:
            raise KeyboardInterrupt

    listener = Listener(interrupt)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize(llama, out, calibration=text, progress=listener, **BASE)
    assert listener.stages[-1][3], "the stage was not finished for its listener"
    assert not out.exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out.work").rglob("*.safetensors")}
    assert before
    if stage < 4:
        quantize(llama, out, calibration=text, keep_work=True, **BASE)
        for path, changed in before.items():
            assert not path.exists() or path.stat().st_mtime_ns == changed, f"{path} was made again"
    else:
        quantize(llama, out, calibration=text, **BASE)
    assert_identical(out, whole_run)
    assert not list(tmp_path.glob(".*partial"))


CHANGES: dict[str, dict[str, Any]] = {
    "bits": {"bits": 4},
    "group_size": {"group_size": 32},
    "symmetric": {"symmetric": False},
    "scale": {"scale": "minmax"},
    "method": {"method": "gptq"},
    "estimator": {"estimator": "kfac"},
    "labels": {"labels": "data"},
    "inputs": {"inputs": "static"},
    "aim": {"aim": 0.125},
    "percdamp_aim": {"percdamp_aim": 0.03},
    "percdamp_in": {"percdamp_in": 0.03},
    "percdamp_out": {"percdamp_out": 0.3},
    "shrink_out": {"shrink_out": 0.3},
    "act_order": {"act_order": "none"},
    "kernel": {"kernel": "torch"},
    "n_sequences": {"n_sequences": 2},
    "sequence_length": {"sequence_length": 18},
    "seed": {"seed": 1},
    "skip": {"skip": "up_proj"},
    "dtype": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_setting_is_refused_with_its_name(
    llama: Path, text: Path, tmp_path: Path, whole_run: Path, field: str
) -> None:
    work = shutil.copytree(whole_run.with_name("whole.work"), tmp_path / "work")
    before = contents(work / "solved")
    options = {**BASE, "calibration": str(text), **CHANGES[field]}
    job = Job(str(llama), Settings.load(None, **options), work)
    with pytest.raises(ResumeError) as raised:
        job.collect()
        job.solve()
    message = str(raised.value).partition(". Run with")[0]
    old, new = (re.search(rf"\b{field} = (.+?)(?=, \w+ = |$)", part) for part in message.split(", now "))
    assert old and new and old.group(1) != new.group(1)
    assert "choose another work directory" in str(raised.value)
    assert contents(work / "solved") == before


def test_a_changed_setting_is_refused_before_anything_is_collected(
    llama: Path, text: Path, tmp_path: Path, whole_run: Path
) -> None:
    work = shutil.copytree(whole_run.with_name("whole.work"), tmp_path / "work")
    before = contents(work)
    with pytest.raises(ResumeError, match=r"estimator = 'shampoo', now estimator = 'kfac'"):
        quantize(llama, tmp_path / "out", work=work, calibration=text, estimator="kfac", **BASE)
    assert contents(work) == before


def test_changed_text_and_changed_weights_are_refused(
    shared: Path, llama: Path, text: Path, tmp_path: Path, whole_run: Path
) -> None:
    work = shutil.copytree(whole_run.with_name("whole.work"), tmp_path / "work")
    with pytest.raises(ResumeError, match=r"made with calibration = "):
        quantize(llama, tmp_path / "out", work=work, calibration=shared / "other.txt", **BASE)
    changed = shutil.copytree(llama, tmp_path / "model")
    tensors = load_file(changed / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ResumeError, match=r"made with model = "):
        quantize(changed, tmp_path / "out", work=work, calibration=text, **BASE)
    assert not (tmp_path / "out").exists()


def test_every_difference_is_named(tmp_path: Path) -> None:
    Store(tmp_path, {"bits": 3, "seed": 0, "kept": None})
    Store(tmp_path, {"bits": 3, "seed": 0, "kept": None})
    with pytest.raises(ResumeError, match=r"made with bits = 3, seed = 0, now bits = 4, seed = 1\."):
        Store(tmp_path, {"bits": 4, "seed": 1, "kept": None})


def test_only_format_may_change_after_a_solve(
    llama: Path, text: Path, tmp_path: Path, whole_run: Path
) -> None:
    work = shutil.copytree(whole_run.with_name("whole.work"), tmp_path / "work")
    options = {**BASE, "format": "compressed-tensors"}
    quantize(llama, tmp_path / "out", work=work, calibration=text, **options)
    packed = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.weight_packed" in packed


@pytest.mark.parametrize(
    "name", ["solved/solved/0001", "collected/factors/shampoo/0001", "collected/boundaries/0000"]
)
def test_a_damaged_piece_is_named_and_doing_what_the_message_says_helps(
    llama: Path, text: Path, tmp_path: Path, whole_run: Path, name: str
) -> None:
    work = shutil.copytree(whole_run.with_name("whole.work"), tmp_path / "work")
    damaged = work / f"{name}.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:100])
    if name.startswith("collected"):
        shutil.rmtree(work / "solved")
    with pytest.raises(ResumeError, match=re.escape(str(damaged))) as raised:
        quantize(llama, tmp_path / "out", work=work, calibration=text, **BASE)
    advice = re.search(r"Delete (\S+) and run again", str(raised.value))
    assert advice
    shutil.rmtree(advice.group(1))
    quantize(llama, tmp_path / "out", work=work, calibration=text, **BASE)
    assert_identical(tmp_path / "out", whole_run)


def test_a_store_holds_pieces_and_their_metadata(tmp_path: Path) -> None:
    store = Store(tmp_path, {})
    value = torch.arange(6.0).view(2, 3)
    store.save("a/b", {"x": value.T}, {"rows": [1, {"y": 0.5}], "n": 3})
    assert store.has("a/b") and not store.has("a/c")
    assert torch.equal(store.load("a/b")["x"], value.T)
    assert store.metadata("a/b") == {"rows": [1, {"y": 0.5}], "n": 3}
    store.remove("a/b")
    store.remove("a/b")
    assert not store.has("a/b")


# 4. Input


def token_ids(path: Path, rows: list[list[int]], pads: list[tuple[int, int]]) -> Path:
    """Rows of ids with (left, right) pads as a tokenizer saves them."""
    width = max(len(row) + sum(pad) for row, pad in zip(rows, pads, strict=True))
    ids = torch.full((len(rows), width), 5)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, (row, (left, _)) in enumerate(zip(rows, pads, strict=True)):
        ids[i, left : left + len(row)] = torch.tensor(row)
        mask[i, left : left + len(row)] = 1
    save_file({"input_ids": ids, "attention_mask": mask}, path)
    return path


@pytest.mark.parametrize(
    "pads", [[(0, 6)] * 3, [(6, 0)] * 3, [(1, 2), (4, 0), (0, 3)]], ids=["right", "left", "mixed"]
)
def test_padded_input_equals_unpadded(llama: Path, tmp_path: Path, pads: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, TINY_VOCAB, (3, 15), generator=generator).tolist()
    options = {**BASE, "sampling": "per-sample"}
    for name, pad in (("plain", [(0, 0)] * 3), ("padded", pads)):
        file = token_ids(tmp_path / f"{name}.safetensors", rows, pad)
        quantize(llama, tmp_path / name, calibration=file, **options)
    plain, padded = (tmp_path / name / "model.safetensors" for name in ("plain", "padded"))
    assert plain.read_bytes() == padded.read_bytes()


def test_texts_of_different_lengths_equal_their_padded_ids(shared: Path, llama: Path, tmp_path: Path) -> None:
    texts = shared / "texts.jsonl"
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    rows = [tokenizer(json.loads(line)["text"])["input_ids"] for line in texts.read_text().splitlines()]
    width = max(map(len, rows)) + 2
    file = token_ids(tmp_path / "ids.safetensors", rows, [(0, width - len(row)) for row in rows])
    options = {**BASE, "sampling": "per-sample", "n_sequences": 5, "sequence_length": 100}
    for name, calibration in (("text", texts), ("ids", file)):
        quantize(llama, tmp_path / name, calibration=calibration, **options)
    one, two = (tmp_path / name / "model.safetensors" for name in ("text", "ids"))
    assert len({len(row) for row in rows}) == 5 and one.read_bytes() == two.read_bytes()


def test_a_sequence_of_one_token_is_no_obstacle(llama: Path, tmp_path: Path) -> None:
    """Shorter ones than two tokens are passed over, two suffice."""
    file = token_ids(tmp_path / "ids.safetensors", [[7], [8, 9], [10, 11, 12, 13]], [(0, 0)] * 3)
    record = quantize(
        llama, tmp_path / "out", calibration=file, **{**BASE, "sampling": "per-sample", "n_sequences": 2}
    )
    assert {row["n_tokens"] for row in record["layers"]} == {6}


def test_long_sequences_are_clamped_and_few_tokens_are_noted(
    shared: Path, llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_text(words(200, 3))
    listener = Listener()
    options = {**BASE, "sequence_length": 4096, "n_sequences": 2, "calibration": str(tmp_path / "long.txt")}
    job = Job(str(llama), Settings.load(None, **options), tmp_path / "work", listener)
    assert {len(ids) for ids in job.sequences} == {128}
    assert any("clamped" in note and "128" in note for note in listener.notes)
    few = Listener()
    options |= {"sequence_length": 20}
    Job(str(llama), Settings.load(None, **options), tmp_path / "work", few)
    assert any("40" in note and "64" in note for note in few.notes)


def refused(
    error: type[BakronError], match: str, model: Path, out: Path, *, absent: bool = True, **options: Any
) -> str:
    """The message of ``quantize``, which must raise before it makes the work or output directory."""
    with pytest.raises(error, match=match) as raised:
        quantize(model, out, **{**BASE, **options})
    assert not out.with_name(out.name + ".work").exists()
    assert not absent or not out.exists()
    return str(raised.value)


def test_nan_weights_are_named_before_work(llama: Path, text: Path, tmp_path: Path) -> None:
    model = shutil.copytree(llama, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 5] = torch.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    refused(NonFiniteError, r"model\.layers\.1\.mlp\.up_proj", model, tmp_path / "out", calibration=text)


def test_a_full_output_is_refused_and_kept(llama: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    refused(OutputExistsError, "not empty", llama, out, calibration=text, absent=False)
    assert contents(out) == {"notes.txt": b"mine"}


def test_an_output_around_or_inside_the_model_is_refused_before_work(
    llama: Path, text: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(llama, tmp_path / "model")
    before = contents(model)
    refused(OutputExistsError, "contain", model, model / "out", calibration=text)
    refused(OutputExistsError, "contain", model, model, calibration=text, absent=False, overwrite=True)
    assert contents(model) == before


@pytest.mark.parametrize("form", ["dense", "compressed-tensors"])
def test_a_group_size_that_does_not_divide_lists_every_layer(
    llama: Path, text: Path, tmp_path: Path, form: str
) -> None:
    message = refused(
        FormatError, "24", llama, tmp_path / "out", calibration=text, group_size=24, format=form
    )
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert all(
        re.search(rf"layers\.{b}\..*{layer}.*\b(32|64)\b", message) for b in (0, 1) for layer in layers
    )
    partly = refused(FormatError, "64", llama, tmp_path / "out", calibration=text, group_size=64, format=form)
    assert "q_proj" in partly and "down_proj" not in partly


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "no such file"),
        ("", "empty"),
        ("   \n", "empty"),
        ("too short", r"10|11"),
        (b"\xff\xfe\x00bin", "UTF-8"),
    ],
    ids=["missing", "empty", "blank", "short", "binary"],
)
def test_bad_text_is_refused(llama: Path, tmp_path: Path, content: str | bytes | None, match: str) -> None:
    file = tmp_path / "file.txt"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    refused(DataError, match, llama, tmp_path / "out", calibration=file)


def test_bad_evaluation_text_is_refused_before_work(llama: Path, text: Path, tmp_path: Path) -> None:
    refused(
        DataError,
        "no such file",
        llama,
        tmp_path / "out",
        calibration=text,
        evaluation=tmp_path / "absent.txt",
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"calibration": None}, r"calibration.*needs text"),
        ({"kernel": "fast"}, r"kernel.*'fast'.*numba"),
        ({"labels": "text"}, r"labels.*'text'.*data"),
        ({"format": "gguff"}, r"gguff"),
        ({"estimator": "shampo"}, r"shampo.*shampoo"),
        ({"bits": 9}, r"bits.*9"),
        ({"bit": 3}, r"'bit'.*'bits'"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_bad_settings_are_refused_before_work(
    llama: Path, text: Path, tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    refused(ConfigError, match, llama, tmp_path / "out", **{"calibration": text, **options})


def test_a_model_with_nothing_left_to_quantize_is_refused(llama: Path, text: Path, tmp_path: Path) -> None:
    refused(ModelError, r"no linear.*skip", llama, tmp_path / "out", calibration=text, skip="layers")


def test_a_model_that_is_not_there_is_refused(text: Path, tmp_path: Path) -> None:
    refused(ModelError, "absent", tmp_path / "absent", tmp_path / "out", calibration=text)


def test_conv1d_is_refused_by_compressed_tensors_which_names_dense(
    shared: Path, text: Path, tmp_path: Path
) -> None:
    message = refused(
        FormatError,
        "dense",
        model_of(shared, "gpt2"),
        tmp_path / "out",
        calibration=text,
        format="compressed-tensors",
    )
    for b in (0, 1):
        for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            assert f"transformer.h.{b}.{layer}" in message


def test_a_local_estimator_that_does_not_fit_the_model_is_refused_before_work(
    shared: Path, text: Path, tmp_path: Path
) -> None:
    refused(
        ModelError,
        r"transformer\.h\.0: its attention.*mlp_local",
        model_of(shared, "gpt2"),
        tmp_path / "out",
        calibration=text,
        estimator="attention_local",
    )


def test_a_full_disk_is_refused_before_work(
    llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    refused(DiskSpaceError, r"GB are free", llama, tmp_path / "out", calibration=text)


def test_an_output_disk_that_is_full_is_refused_before_work(
    llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work directory's disk has room, the output's does not."""
    (tmp_path / "big").mkdir()
    (tmp_path / "small").mkdir()
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=0 if "small" in str(path) else 10**12)
    )
    work = tmp_path / "big" / "work"
    refused(DiskSpaceError, "small", llama, tmp_path / "small" / "out", calibration=text, work=work)
    assert not work.exists()


def test_required_space_is_measured_on_the_nearest_directory_that_exists(tmp_path: Path) -> None:
    require_space(tmp_path / "a" / "b", 0, "the test")
    with pytest.raises(DiskSpaceError, match=r"the test needs \d+\.\d+ GB"):
        require_space(tmp_path / "a" / "b", 10**18, "the test")


def test_a_disk_that_fills_up_keeps_finished_work(
    llama: Path, text: Path, tmp_path: Path, whole_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = 0

    def save(*args: Any, **options: Any) -> None:
        nonlocal saved
        saved += 1
        if saved == 6:
            Path(args[1]).write_bytes(b"a part of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("bakron.run.store.save_file", save)
        with pytest.raises(DiskSpaceError, match="finished work is kept"):
            quantize(llama, tmp_path / "out", calibration=text, **BASE)
    assert len(list((tmp_path / "out.work").rglob("*.safetensors"))) == 5
    assert not list((tmp_path / "out.work").rglob("*.partial"))
    quantize(llama, tmp_path / "out", calibration=text, **BASE)
    assert_identical(tmp_path / "out", whole_run)


@pytest.mark.parametrize("kernel", ["reference", "torch"])
def test_every_kernel_may_be_asked_for(llama: Path, text: Path, tmp_path: Path, kernel: str) -> None:
    options = {"method": "gptq", "skip": r"layers\.0|mlp", "calibration": text, **BASE}
    for name in ("auto", kernel):
        quantize(llama, tmp_path / name, kernel=name, **options)
    auto, asked = (load_file(tmp_path / name / "model.safetensors") for name in ("auto", kernel))
    assert all(torch.equal(value, asked[key]) for key, value in auto.items())


def test_only_our_own_files_leave_the_work_directory(llama: Path, text: Path, tmp_path: Path) -> None:
    work = tmp_path / "mine"
    work.mkdir()
    (work / "thesis.txt").write_text("years of work")
    quantize(llama, tmp_path / "out", calibration=text, work=work, **BASE)
    assert contents(work) == {"thesis.txt": b"years of work"}


# 5. End to end

# family, tied, dtype of the source, and what differs from BASE
CASES: list[tuple[str, bool | None, torch.dtype, dict[str, Any]]] = [
    ("llama", True, torch.float32, {"bits": 2, "symmetric": False}),
    ("mistral", False, torch.bfloat16, {"bits": 3, "group_size": -1}),
    ("qwen2", True, torch.float32, {"bits": 4, "inputs": "static"}),
    ("qwen3", False, torch.float32, {"bits": 8, "method": "gptq"}),
    ("gemma", True, torch.bfloat16, {"bits": 4, "symmetric": False}),
    ("gemma2", True, torch.float32, {"bits": 3, "method": "rtn", "group_size": -1, "symmetric": False}),
    ("gemma3", True, torch.float32, {"bits": 3, "estimator": "kfac"}),
    ("phi3", False, torch.float32, {"bits": 2, "method": "gptq", "inputs": "static", "group_size": 32}),
    ("gpt2", True, torch.float32, {"bits": 8, "symmetric": False}),
    ("gpt2", False, torch.bfloat16, {"bits": 3, "inputs": "static", "group_size": -1}),
    ("llama", False, torch.bfloat16, {"bits": 8}),
]
IDS = [f"{family}-{tied}-{dtype}-{'-'.join(map(str, o.values()))}" for family, tied, dtype, o in CASES]


def test_the_cases_cover_every_family_width_and_switch() -> None:
    assert {case[0] for case in CASES} == set(FAMILIES)
    for key, wanted in {
        "bits": {2, 3, 4, 8},
        "inputs": {"sequential", "static"},
        "symmetric": {True, False},
    }.items():
        default = {"bits": 3, "inputs": "sequential", "symmetric": True}[key]
        assert {case[3].get(key, default) for case in CASES} >= wanted
    assert {case[1] for case in CASES} == {True, False} and {case[2] for case in CASES} == {
        torch.float32,
        torch.bfloat16,
    }


@pytest.mark.parametrize("form", ["dense", "compressed-tensors"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_transformers_loads_is_what_was_solved(
    shared: Path,
    text: Path,
    tmp_path: Path,
    case: tuple[str, bool | None, torch.dtype, dict[str, Any]],
    form: str,
) -> None:
    family, tied, dtype, options = case
    if family == "gpt2" and form != "dense":
        pytest.skip("compressed-tensors cannot hold Conv1D; another test has the refusal")
    source = model_of(shared, family, tied=tied, dtype=dtype)
    chosen = {**BASE, **options, "format": form}
    record = quantize(source, tmp_path / "out", calibration=text, keep_work=True, **chosen)
    solved = pieces(tmp_path / "out.work")
    names = {key.removesuffix(".codes") for key in solved if key.endswith(".codes")}

    loaded, original = reload(tmp_path / "out", form), reload(source, "dense")
    expected = {name: dense_of(solved, name) for name in names}
    check_codes(solved, names, chosen)
    kept = original.state_dict()
    for key, value in loaded.state_dict().items():
        name = key.removesuffix(".weight")
        if name in names:
            weight = value.T if family == "gpt2" else value
            assert weight.dtype == dtype and torch.equal(weight, expected[name]), name
            assert not torch.equal(value, kept[key]), f"{name} was not quantized"
        else:
            assert torch.equal(value, kept[key]), f"{key} changed"
    assert {row["name"] for row in record["layers"]} == names == set(record["sha256"])
    assert loaded.config.tie_word_embeddings is tied
    head, embedding = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
    assert (head.data_ptr() == embedding.data_ptr()) is tied


def reload(path: Path, form: str) -> Any:
    """The checkpoint in its own dtype, as its users load it."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    if form == "dense":
        return AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    config = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto", quantization_config=config)


def check_codes(solved: dict[str, Tensor], names: set[str], settings: dict[str, Any]) -> None:
    """Codes in range and using it; groups of the size asked for; zeros only when asymmetric."""
    limit = 2 ** (settings["bits"] - 1)
    for name in names:
        codes, scale, zero = (solved[f"{name}.{key}"] for key in ("codes", "scale", "zero"))
        assert -limit <= int(codes.min()) and int(codes.max()) <= limit - 1
        assert int(codes.max()) - int(codes.min()) > limit
        groups = 1 if settings["group_size"] == -1 else codes.shape[1] // settings["group_size"]
        assert scale.shape == zero.shape == (codes.shape[0], groups)
        assert bool(zero.any()) is not settings.get("symmetric", True)


def test_skipped_layers_stay_as_they_are(llama: Path, text: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "out", calibration=text, skip=["up_proj", r"layers\.0\.self_attn"], **BASE)
    before, after = (load_file(path / "model.safetensors") for path in (llama, tmp_path / "out"))
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    skipped = re.compile(r"up_proj|layers\.0\.self_attn|norm|embed|lm_head")
    assert changed == {key for key in before if not skipped.search(key)} and len(changed) == 8


def test_quality_before_and_after_goes_into_the_record_and_the_card(
    shared: Path, llama: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "held_out.txt").write_text(words(3000, 9))
    record = quantize(llama, tmp_path / "out", calibration=text, evaluation=tmp_path / "held_out.txt", **BASE)
    quality = record["quality"]
    assert quality["kl"] > 0 and quality["perplexity_after"] != quality["perplexity_before"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "held_out.txt" in card and "not measured" not in card


def test_overwrite_replaces_a_checkpoint(llama: Path, text: Path, tmp_path: Path, whole_run: Path) -> None:
    out = tmp_path / "out"
    quantize(llama, out, method="rtn", **BASE)
    quantize(llama, out, calibration=text, overwrite=True, **BASE)
    assert_identical(out, whole_run)


def test_methods_are_compared_on_one_collection(
    shared: Path, llama: Path, text: Path, tmp_path: Path
) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text(words(300, 9))
    data = {**BASE, "calibration": str(text)}
    variants = {method: Settings.load(None, method=method, **data) for method in ("rtn", "gptq", "bakron")}
    options = {"n_sequences": 3, "sequence_length": 40}
    rows = compare(llama, variants, held_out, tmp_path / "work", **options)
    assert [row["label"] for row in rows] == ["original", "rtn", "gptq", "bakron"]
    kl = {row["label"]: row["kl"] for row in rows[1:]}
    assert len(set(kl.values())) == 3 and min(kl.values()) > 0

    alone = compare(llama, {"gptq": variants["gptq"]}, held_out, tmp_path / "alone", **options)
    assert (alone[1]["kl"], alone[1]["perplexity"]) == (rows[2]["kl"], rows[2]["perplexity"])
    again = compare(llama, variants, held_out, tmp_path / "work", **options)
    assert [(r["label"], r["perplexity"]) for r in again] == [(r["label"], r["perplexity"]) for r in rows]


def test_methods_on_different_data_are_not_compared(
    shared: Path, llama: Path, text: Path, tmp_path: Path
) -> None:
    variants = {str(seed): Settings.load(None, seed=seed, calibration=str(text), **BASE) for seed in (0, 1)}
    with pytest.raises(ConfigError, match="seed must be the same for all"):
        compare(llama, variants, text, tmp_path / "work")
    assert not (tmp_path / "work").exists()


# 6. Plan and progress


def test_every_stage_counts_to_its_end(llama: Path, text: Path, tmp_path: Path) -> None:
    listener = Listener()
    quantize(llama, tmp_path / "out", calibration=text, progress=listener, **BASE)
    assert len(listener.stages) == 5
    assert all(done == total > 0 and finished for _, total, done, finished in listener.stages)


@pytest.mark.parametrize("inputs", ["sequential", "static"])
@pytest.mark.parametrize(
    ("method", "estimator", "label_samples"),
    [
        ("bakron", None, 1),
        ("bakron", None, 5),
        ("bakron", "token", 1),
        ("bakron", "token", 5),
        ("bakron", "attention_local_shampoo", 1),
        ("gptq", None, 1),
        ("rtn", None, 1),
    ],
)
def test_the_work_directory_stays_within_the_plan(
    llama: Path,
    text: Path,
    tmp_path: Path,
    method: str,
    estimator: str | None,
    label_samples: int,
    inputs: str,
) -> None:
    plans: list[Any] = []
    largest = 0

    def measure(_count: int) -> None:
        nonlocal largest
        files = [path for path in (tmp_path / "out.work").rglob("*") if path.is_file()]
        largest = max(largest, sum(path.stat().st_size - _header(path) for path in files))

    quantize(
        llama, tmp_path / "out", calibration=text, progress=Listener(measure), on_plan=plans.append, method=method,
        estimator=estimator, label_samples=label_samples, inputs=inputs, **BASE,
    )  # fmt: skip
    (plan,) = plans
    assert 0 < largest <= plan.disk
    assert plan.n_linears == 14 and plan.n_tokens == (0 if method == "rtn" else 60)


def _header(path: Path) -> int:
    """The bytes of a file that are no tensor data; they do not grow with a model's width."""
    if path.suffix != ".safetensors":
        return path.stat().st_size
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("inputs", ["sequential", "static"])
def test_memory_does_not_grow_with_the_number_of_blocks(
    shared: Path, text: Path, tmp_path: Path, inputs: str
) -> None:
    """All tensors alive at any step, parameters apart: as many bytes for six blocks as for two, and within the plan."""
    peaks: dict[int, int] = {}
    for n_blocks in (2, 6):
        model = model_of(shared, num_hidden_layers=n_blocks)
        options = {**BASE, "calibration": str(text), "inputs": inputs, "n_sequences": 2}
        job = Job(str(model), Settings.load(None, **options), tmp_path / str(n_blocks))
        known = {id(tensor) for tensor in live_tensors()}
        peak = 0

        def measure(_count: int, known: set[int] = known) -> None:
            nonlocal peak
            storages = {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for tensor in live_tensors()
                if id(tensor) not in known
            }
            peak = max(peak, sum(storages.values()))

        job.progress = Listener(measure)
        job.collect()
        job.solve()
        peaks[n_blocks] = peak
        plan = job.plan()
        assert plan.factors // 4 < peak <= plan.memory - plan.model
    assert peaks[6] <= 1.05 * peaks[2]


def live_tensors() -> list[Tensor]:
    return [item for item in gc.get_objects() if type(item) is torch.Tensor]
