"""Claims about several processes that share a run: they make what one makes, and none is missed when it dies.

1. Division: every thing and every task has one rank; shares are contiguous and even, also with more ranks than things.
2. Together: sums are added in rank order, bit for bit; pieces are joined in rank order; every rank gets what it should.
3. Runs: states and token weights have the bytes of a run by one process, factors are its factors to 1e-6, and at least
   999 of 1000 codes are its codes, for every kind of collection and solve. The same number of ranks gives the same bytes.
4. Ends: one rank that dies or raises ends all; finished pieces serve any other number of ranks.
5. torchrun: the rank that was killed is named; what is wrong is said once; only the first rank prints.

Runs are made in forked processes with the variables that torchrun sets; those of 5 by torchrun itself.
Kinds: oracle, property, behaviour.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_models import tiny_decoder
from torch import Tensor

import bakron.run.collect
import bakron.run.ranks
from bakron.errors import ConfigError, RankError
from bakron.run import stages
from bakron.run.compare import compare
from bakron.run.pipeline import quantize
from bakron.run.progress import Silent
from bakron.run.ranks import ALONE, Launched, Ranks, launched
from bakron.run.settings import Settings

BASE: dict[str, Any] = {"bits": 3, "group_size": 16, "n_sequences": 5, "sequence_length": 20}
SECONDS = 300.0  # for what takes ten on a machine with nothing else to do


class Numbered(Ranks):
    """One of several that never talk."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Counting(Silent):
    """Keeps how many steps were announced and done."""

    def __init__(self) -> None:
        self.announced = self.done = 0

    def start(self, label: str, total: int) -> None:
        self.announced += total

    def advance(self, steps: int = 1) -> None:
        self.done += steps


def in_ranks(
    size: int, body: Callable[..., None], *arguments: Any, expect: tuple[int, ...] = ()
) -> list[int]:
    """Run ``body(*arguments)`` in ``size`` ranks; their exit codes, all 0 but for those that are ``expect``ed to fail.

    When one fails, the others are ended, as torchrun does.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm", "test_ranks"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [context.Process(target=_rank, args=(r, size, port, body, arguments)) for r in range(size)]
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # for the fork server, where warm is
        for process in processes:
            process.start()
    ends = time.monotonic() + SECONDS
    while any(process.is_alive() for process in processes) and time.monotonic() < ends:
        if any(process.exitcode for process in processes):
            break
        time.sleep(0.01)
    failed = [process.exitcode or 0 for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert tuple(r for r, code in enumerate(failed) if code) == expect
    assert expect or all(process.exitcode == 0 for process in processes), "not done in time"
    return failed


def _rank(rank: int, size: int, port: int, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size), ("MASTER_PORT", port)):
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    try:
        body(*arguments)
        launched().close()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # as a process does that does not wait for others


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model ``m``, a text, and texts of different lengths."""
    path = tmp_path_factory.mktemp("home")
    tiny_decoder("llama", path / "m", tokenizer=True)
    words = "the quick brown fox jumps over a lazy dog while wizards play".split()
    generator = torch.Generator().manual_seed(0)

    def text(n: int) -> str:
        return " ".join(words[i] for i in torch.randint(len(words), (n,), generator=generator).tolist())

    (path / "text.txt").write_text(text(300))
    lines = [json.dumps({"text": text(2 + i % 4)[: 9 + 3 * i]}) for i in range(6)]
    (path / "texts.jsonl").write_text("\n".join(lines) + "\n")
    return path


# 1. Division


@given(n=st.integers(0, 50), size=st.integers(1, 12))
def test_shares_are_contiguous_even_and_whole(n: int, size: int) -> None:
    shares = [Numbered(rank, size).share(n) for rank in range(size)]
    assert [i for share in shares for i in share] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert n == 0 or 0 in shares[0], "the first rank always has one"


@given(st.lists(st.integers(1, 10**9), max_size=30), st.integers(1, 9))
def test_tasks_are_divided_by_cost_and_all_ranks_agree(costs: list[int], size: int) -> None:
    """No rank has more than the average and one task on top."""
    owners = Numbered(0, size).owners(costs)
    assert all(Numbered(rank, size).owners(costs) == owners for rank in range(size))
    load = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(size)]
    assert sum(load) == sum(costs)
    assert max(load) <= sum(costs) / size + max(costs, default=0)


def test_a_process_by_itself_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    launched.cache_clear()
    for name in bakron.run.ranks.LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")  # left over from something else
    assert launched() is ALONE
    for name in bakron.run.ranks.LAUNCHER:
        monkeypatch.setenv(name, "1")  # torchrun with one process
    launched.cache_clear()
    assert launched() is ALONE


@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [
        ("cuda:0", 8, "cuda:0 is one GPU, and 4 processes"),
        ("auto", 2, "a GPU for each process, seen 2 on the machine of rank 3"),
        ("cuda", 0, "seen 0 on"),
        ("auto", 0, None),
        ("cpu", 2, None),
        ("cuda", 4, None),
    ],
)
def test_each_rank_needs_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, message: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    rank = Launched.__new__(Launched)
    rank.rank, rank.local, rank.size = 3, 3, 4
    if message is None:
        rank.require_device(device)
        return
    with pytest.raises(ConfigError, match=message):
        rank.require_device(device)


# 2. Together


def sums_of(rank: int) -> dict[str, Tensor]:
    """What each rank has to add: one that all have, with numbers whose order of addition shows; one that two have."""
    generator = torch.Generator().manual_seed(rank)
    own = {"all": torch.randn(7, 5, generator=generator, dtype=torch.float64).exp() ** 9}
    return own | ({f"of {rank}": own["all"] * 2, "two": own["all"].T} if rank else {})


def pieces_of(rank: int) -> dict[str, list[Tensor]]:
    if rank == 1:
        return {}
    wide = [torch.full((n, 3), 10.0 * rank + n, dtype=torch.bfloat16) for n in range(rank + 2)]
    return {"wide": wide, f"of {rank}": [torch.arange(rank + 1)]}


def _together(folder: Path) -> None:
    ranks = launched()
    answer = {
        "total": ranks.total(sums_of(ranks.rank)),
        "joined": ranks.joined(pieces_of(ranks.rank)),
        "exchanged": ranks.exchanged({f"of {ranks.rank}": (ranks.rank, torch.ones(ranks.rank))}),
        "first": ranks.from_first(lambda: f"of {ranks.rank}"),
        "says": ranks.first_to_say("the same"),
        "says its own": ranks.first_to_say(str(ranks.rank)),
    }
    torch.save(answer, folder / str(ranks.rank))


def test_sums_pieces_and_objects_come_together(tmp_path: Path) -> None:
    in_ranks(3, _together, tmp_path)
    answers = [torch.load(tmp_path / str(rank), weights_only=False) for rank in range(3)]
    each = [sums_of(rank) for rank in range(3)]
    expected = {
        "all": (each[0]["all"] + each[1]["all"]) + each[2]["all"],
        "of 1": each[1]["of 1"],
        "two": each[1]["two"] + each[2]["two"],
        "of 2": each[2]["of 2"],
    }
    other_order = each[0]["all"] + (each[1]["all"] + each[2]["all"])
    assert not torch.equal(expected["all"], other_order), "the numbers do not show the order"
    for answer in answers:
        assert list(answer["total"]) == list(expected)
        assert all(torch.equal(answer["total"][key], value) for key, value in expected.items())
        assert list(answer["exchanged"]) == ["of 0", "of 1", "of 2"]
        assert answer["exchanged"]["of 2"][0] == 2 and len(answer["exchanged"]["of 2"][1]) == 2
        assert answer["first"] == "of 0"
        assert answer["says its own"]
    joined = answers[0]["joined"]
    wide = torch.cat([*pieces_of(0)["wide"], *pieces_of(2)["wide"]])
    assert torch.equal(joined["wide"], wide) and joined["wide"].dtype == torch.bfloat16
    assert torch.equal(joined["of 2"], torch.arange(3))
    assert answers[1]["joined"] == answers[2]["joined"] == {}
    assert sum(answer["says"] for answer in answers) == 1


# 3. Runs


def _quantize(home: Path, out: Path, options: dict[str, Any]) -> None:
    progress = Counting()
    record = quantize(home / "m", out, ranks=launched(), progress=progress, keep_work=True, **options)
    assert record == json.loads((out / "bakron.json").read_text()), "all ranks return the record"
    assert progress.done == progress.announced


def files_of(work: Path) -> dict[str, dict[str, Tensor]]:
    """All tensors of a work directory by file; states that a finished run leaves behind count, too."""
    files = sorted(work.rglob("*.safetensors"))
    return {str(file.relative_to(work)): load_file(file) for file in files}


def assert_same_run(seen: Path, expected: Path) -> None:
    """Claim 3, of two work directories."""
    a, b = files_of(seen), files_of(expected)
    assert a.keys() == b.keys() and a
    same, n_codes = 0, 0
    for file, tensors in b.items():
        assert list(a[file]) == list(tensors), file
        for key, value in tensors.items():
            other = a[file][key]
            assert other.dtype == value.dtype and other.shape == value.shape, key
            if key.endswith((".H_in", ".H_out")):
                assert float((other - value).abs().max()) <= 1e-6 * float(value.abs().max()), key
            elif key.endswith(".codes"):
                same, n_codes = same + int((other == value).sum()), n_codes + value.numel()
            elif file.startswith("collected/"):
                assert torch.equal(other, value), f"{file}: {key}"
    assert same >= 0.999 * n_codes > 0


RUNS: dict[str, dict[str, Any]] = {
    "bakron": {},
    "texts of different lengths": {"calibration": "texts.jsonl", "sampling": "per-sample"},
    "gptq": {"method": "gptq"},
    "rtn": {"method": "rtn"},
    "three passes, static": {"estimator": "token", "inputs": "static"},
    "three passes of gradients": {"estimator": "sequence", "labels": "data"},
    "local": {"estimator": "attention_local_shampoo"},
    "fewer sequences than ranks": {"n_sequences": 2},
}


def options_of(home: Path, name: str) -> dict[str, Any]:
    options = {**BASE, "calibration": "text.txt", **RUNS[name]}
    return {**options, "calibration": str(home / options["calibration"])}


@pytest.fixture(scope="module")
def one(home: Path) -> Callable[[str], Path]:
    """The output of one process for a name in ``RUNS``, made when first asked for."""

    def made(name: str) -> Path:
        out = home / "one" / name
        if not out.exists():
            in_ranks(1, _quantize, home, out, options_of(home, name))
        return out

    return made


@pytest.mark.parametrize("name", RUNS)
def test_several_processes_make_what_one_makes(
    home: Path, tmp_path: Path, one: Callable[[str], Path], name: str
) -> None:
    expected = one(name)
    in_ranks(3, _quantize, home, tmp_path / "out", options_of(home, name))
    assert_same_run(tmp_path / "out.work", expected.with_name(expected.name + ".work"))
    seen, wanted = (json.loads((path / "bakron.json").read_text()) for path in (tmp_path / "out", expected))
    assert [row["name"] for row in seen["layers"]] == [row["name"] for row in wanted["layers"]]
    assert seen["layers"][0]["n_tokens"] == wanted["layers"][0]["n_tokens"]


def test_the_same_number_of_ranks_gives_the_same_bytes(home: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        in_ranks(2, _quantize, home, tmp_path / name, options_of(home, "bakron"))
    assert_identical(tmp_path / "a", tmp_path / "b")


def assert_identical(a: Path, b: Path) -> None:
    assert sorted(file.name for file in a.iterdir()) == sorted(file.name for file in b.iterdir())
    assert [f.name for f in a.iterdir() if f.read_bytes() != (b / f.name).read_bytes()] == []


def _stages(home: Path, work: Path, options: dict[str, Any]) -> None:
    stages.collect(home / "m", work, ranks=launched(), **options)
    stages.solve(work, ranks=launched())


def test_the_stages_are_shared_too(home: Path, tmp_path: Path) -> None:
    options = options_of(home, "bakron")
    in_ranks(2, _stages, home, tmp_path / "work", options)
    stages.export(tmp_path / "work", tmp_path / "out")
    in_ranks(2, _quantize, home, tmp_path / "whole", options)
    assert_identical(tmp_path / "out", tmp_path / "whole")


def _given_factors(home: Path, factors: Path, out: Path) -> None:
    options = {**BASE, "method": "bakron", "inputs": "static", "hessians": factors}
    quantize(home / "m", out, ranks=launched(), **options)


def test_given_factors_are_shared(home: Path, tmp_path: Path, one: Callable[[str], Path]) -> None:
    factors = one("three passes, static").with_name("three passes, static.work")
    for size in (1, 2):
        in_ranks(size, _given_factors, home, factors, tmp_path / str(size))
    assert_identical(tmp_path / "1", tmp_path / "2")


def _compare(home: Path, folder: Path) -> None:
    variants = {
        method: Settings.load(None, method=method, calibration=str(home / "text.txt"), **BASE)
        for method in ("rtn", "bakron")
    }
    rows = compare(
        home / "m", variants, home / "text.txt", folder / f"work{launched().size}", ranks=launched(), n_sequences=2,
        sequence_length=40,
    )  # fmt: skip
    values = [{key: value for key, value in row.items() if key != "solve_seconds"} for row in rows]
    (folder / f"rows{launched().rank}of{launched().size}").write_text(json.dumps(values))


def test_compare_is_shared(home: Path, tmp_path: Path) -> None:
    """All ranks return the same rows, which are those of one process."""
    for size in (1, 2):
        in_ranks(size, _compare, home, tmp_path)
    a, b, c = (json.loads((tmp_path / f"rows{name}").read_text()) for name in ("0of1", "0of2", "1of2"))
    assert b == c
    for row, expected in zip(b, a, strict=True):
        assert row == {
            **expected,
            **{k: pytest.approx(v) for k, v in expected.items() if isinstance(v, float)},
        }


# 4. Ends


def _dying(home: Path, out: Path, options: dict[str, Any], rank: int, checked: int, how: str) -> None:
    """A run in which one rank is killed, or raises, when it has computed so many states and gradients."""
    check, count = bakron.run.collect.check_finite, 0

    def counted(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if launched().rank == rank and count == checked:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a defect")
        check(*arguments)

    bakron.run.collect.check_finite = bakron.run.solve.check_finite = counted
    quantize(home / "m", out, ranks=launched(), keep_work=True, **options)


@pytest.mark.parametrize(("checked", "later"), [(3, 7), (8, 4), (12, 3)])  # forward, backward, solve
def test_work_of_a_run_that_died_serves_any_number_of_ranks(
    home: Path, tmp_path: Path, one: Callable[[str], Path], checked: int, later: int
) -> None:
    """Rank 1 of 2 is killed; three ranks and then one go on where it was, and make no finished piece again."""
    options = options_of(home, "bakron")
    codes = in_ranks(2, _dying, home, tmp_path / "out", options, 1, checked, "kill", expect=(1,))
    assert codes[1] == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    in_ranks(3, _dying, home, tmp_path / "out", options, 1, later, "raise", expect=(1,))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out.work").rglob("*.safetensors")}
    assert len(before) >= 2
    in_ranks(1, _quantize, home, tmp_path / "out", options)
    assert all(path.stat().st_mtime_ns == at for path, at in before.items() if path.exists())
    assert_same_run(tmp_path / "out.work", one("bakron").with_name("bakron.work"))


def test_a_killed_run_resumed_by_as_many_ranks_gives_the_same_bytes(home: Path, tmp_path: Path) -> None:
    options = options_of(home, "bakron")
    in_ranks(2, _dying, home, tmp_path / "out", options, 0, 8, "kill", expect=(0,))
    for name in ("out", "whole"):
        in_ranks(2, _quantize, home, tmp_path / name, options)
    assert_identical(tmp_path / "out", tmp_path / "whole")


def _left_alone() -> None:
    """Rank 1 goes without a word; rank 0 must notice."""
    ranks = launched()
    if ranks.rank == 1:
        os._exit(0)
    bakron.run.ranks.GRACE = 0.0
    with pytest.raises(RankError, match="connection to another process of the run is lost"):
        ranks.from_first(lambda: None)
    os._exit(0)


def test_a_lost_rank_is_noticed_by_the_others(home: Path) -> None:
    started = time.monotonic()
    in_ranks(2, _left_alone)
    assert time.monotonic() - started < SECONDS / 2


# 5. torchrun


def torchrun(n: int, *arguments: Any, script: tuple[str, ...] = ("-m", "bakron")) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    return subprocess.Popen(
        [*command, *script, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def grid(home: Path) -> list[Any]:
    """The options of ``BASE`` on the command line."""
    options = [part for key, value in BASE.items() for part in (f"--{key.replace('_', '-')}", value)]
    return [*options, "--calibration", home / "text.txt"]


KILLED = """
import os, signal
import bakron.run.collect as collect
from bakron.cli import app
if os.environ["RANK"] == "1":
    collect._head_gradients = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
app()
"""

PARTED = """
import atexit, os
from pathlib import Path
from bakron.cli import app
def parted():
    if any("gloo" in comm.read_text() for comm in Path("/proc/self/task").glob("*/comm")):
        os._exit(3)
atexit.register(parted)
app()
"""


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_command_resumes(home: Path, tmp_path: Path) -> None:
    """The command as users start it: killed, then run again, with tables and JSON from the first rank only.

    At the end no thread of the process group is left: one that still let go of a tensor while Python ends would abort.
    """
    (tmp_path / "killed.py").write_text(KILLED)
    (tmp_path / "parted.py").write_text(PARTED)
    arguments = ("quantize", home / "m", tmp_path / "out", *grid(home), "--json")
    started = time.monotonic()
    process = torchrun(2, *arguments, script=(str(tmp_path / "killed.py"),))
    _, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode != 0 and time.monotonic() - started < SECONDS
    assert "rank      : 1 (local_rank: 1)" in stderr and "SIGKILL" in stderr
    assert (tmp_path / "out.work").exists() and not (tmp_path / "out").exists()
    process = torchrun(2, *arguments, script=(str(tmp_path / "parted.py"),))
    stdout, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, stderr
    assert json.loads(stdout) == json.loads((tmp_path / "out" / "bakron.json").read_text())
    assert stderr.count("in each of 2 processes") == stderr.count("Wrote ") == 1
    in_ranks(2, _quantize, home, tmp_path / "whole", options_of(home, "bakron"))
    assert_identical(tmp_path / "out", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quantize", "m", "out", "--bits", 99), "error: rank [01] of 2: bits"),
        (
            ("eval", "m", "--text", "text.txt"),
            "error: bakron eval does all its work in one process, and 2 were",
        ),
    ],
)
def test_bad_input_is_named_once(home: Path, arguments: tuple[Any, ...], message: str) -> None:
    process = torchrun(2, *(home / a if a in ("m", "out", "text.txt") else a for a in arguments))
    _, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert stderr.count("error: ") == 1 and len(re.findall(message, stderr)) == 1, stderr
