"""Time, arithmetic, memory and loss of the solver on a CPU, against classic GPTQ, its own flops, and two libraries.

    python benchmarks/solver.py --peer-python gptqmodel=PATH/bin/python --peer-python llmcompressor=PATH/bin/python
    python benchmarks/solver.py --report

The first command appends one row for each method and shape to ``--results``; a shape whose methods all have a row
of the same solver commit, hardware and number of threads is skipped, so that an interrupted run goes on where it
was (except with uncommitted changes of the solver, which cannot be told apart). All methods of a shape are timed in turn, round after round. The second one (`pip install "bakron[bench]"`)
rewrites the tables of docs/performance.md and the plot beside it from these rows.

The libraries run in virtual environments of their own, since their dependencies differ; without ``--peer-python``
they are left out:

    python3 -m venv peers/gptqmodel
    peers/gptqmodel/bin/pip install torch==2.13.0          # first: the other package is built against it
    peers/gptqmodel/bin/pip install gptqmodel==7.6.0
    python3 -m venv peers/llmcompressor
    peers/llmcompressor/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from baselines import classic_gptq, quartic
from problems import PERCDAMP, Problem, make_problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bakron.core.hessian import KroneckerHessian
from bakron.core.linalg import factorise, gathered
from bakron.core.parallel import team
from bakron.core.solution import LayerProblem, sides, solve_problem
from bakron.core.solver import sweep
from bakron.kernels import get_kernel

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
SHAPES = [
    *("256", "512", "1024", "2048", "4096", "8192"),
    *("1024x4096", "4096x1024", "4096x11008", "11008x4096", "4096x14336"),
]
SMALL = {"quartic": 1024}  # methods that are measured only on matrices of at most so many rows and columns
COUNTED = 4096  # products are counted, in an extra sweep, on matrices of at most so many rows and columns
MEMORY_METHODS = ("bakron", "bakron-certified", "classic")
MEMORY_SIZES = (2048, 4096)  # peak memory is measured where both sides are within these
PEERS = ("gptqmodel", "llmcompressor")


class Outcome(NamedTuple):
    """The rounded weight (m, n), and the seconds that parts of the method took, by name."""

    weight: Tensor
    parts: dict[str, float]


# ------------------------------------------------------------------------------------------------ methods


def bakron(problem: Problem, one_sided: bool = False) -> Outcome:
    """Our solver without certificate: checks, act-order, factorisations, sweep, and order undone."""
    started = time.perf_counter()
    hessian = KroneckerHessian(problem.H_in, None if one_sided else problem.H_out)
    layer = LayerProblem("layer", problem.W, hessian, PERCDAMP, PERCDAMP)
    with team() as threads:
        (columns, _, U_in), (rows, _, U_out) = sides(layer, "both", threads)
        W = [gathered(problem.W, rows, columns, torch.float32, threads)]
    grid = problem.grid.permute(rows, columns)
    factored = time.perf_counter()
    ordered = sweep(W.pop(), grid, U_in, U_out, get_kernel("auto", CPU))  # which frees it
    swept = time.perf_counter()
    with team() as threads:
        codes = gathered(ordered, torch.argsort(rows), torch.argsort(columns), ordered.dtype, threads)
    return Outcome(problem.grid.values(codes), {"factorise": factored - started, "sweep": swept - factored})


def certified(problem: Problem) -> Outcome:
    """``solve_problem`` as the product calls it: with checks of the input and the float64 certificate."""
    hessian = KroneckerHessian(problem.H_in, problem.H_out)
    layer = LayerProblem("layer", problem.W, hessian, PERCDAMP, PERCDAMP)
    return Outcome(solve_problem(layer, problem.grid, "both", get_kernel("auto", CPU)).weight, {})


def quartic_rounding(problem: Problem) -> Outcome:
    """Two-sided rounding at quartic cost, with its factorisations; no act-order."""
    started = time.perf_counter()
    U_in, U_out = (factorise(H.to(torch.float64), PERCDAMP, "H").U for H in (problem.H_in, problem.H_out))
    factored = time.perf_counter()
    return Outcome(quartic(problem, U_in, U_out), {"factorise": factored - started})


METHODS: dict[str, Callable[[Problem], Outcome]] = {
    "bakron": bakron,
    "bakron-one-sided": lambda problem: bakron(problem, one_sided=True),
    "bakron-certified": certified,
    "classic": lambda problem: Outcome(classic_gptq(problem), {}),
    "classic-transposed": lambda problem: Outcome(classic_gptq(problem, transposed=True), {}),
    "quartic": quartic_rounding,
}


class Peer:
    """A library's GPTQ in a process of its own, which waits while others are timed (benchmarks/peers/serve.py)."""

    def __init__(self, name: str, python: str, threads: int) -> None:
        script = Path(__file__).parent / "peers" / f"{name}_gptq.py"
        # GPTQModel sizes its pools by the second; neither may look for a GPU
        limits = {"CUDA_VISIBLE_DEVICES": "", "GPTQMODEL_CPU_WORKERS": str(max(threads, 2))}
        self.name = name
        answers, end = os.pipe()  # a library may print whatever it likes: its stdout is our stderr
        self.process = subprocess.Popen(
            [python, str(script), str(threads), str(end)],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=(end,),
            text=True,
            env={**os.environ, **limits, "OMP_NUM_THREADS": str(threads)},
        )
        os.close(end)
        self.answers = os.fdopen(answers)
        self.version = str(self._answer()["version"])

    def run(self, folder: Path) -> tuple[float, Outcome]:
        """Seconds and outcome for the problem saved in ``folder``."""
        weight = folder / f"{self.name}.npy"
        assert self.process.stdin is not None
        request = {"folder": str(folder), "weight": str(weight), "percdamp": PERCDAMP}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        seconds = float(self._answer()["seconds"])
        return seconds, Outcome(torch.from_numpy(np.load(weight)), {})

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        line = self.answers.readline()
        if not line:
            raise SystemExit(f"{self.name}: its process ended, see the messages above")
        return json.loads(line)


# --------------------------------------------------------------------------------------------- measurement


def measure_shape(
    m: int, n: int, methods: Sequence[str], peers: dict[str, Peer], repeats: int, seconds: float, threads: int
) -> list[dict[str, Any]]:
    """A row for each method; ``repeats`` rounds, or fewer (at least one) where they would take over ``seconds``."""
    problem = make_problem(m, n)
    times: dict[str, list[float]] = {method: [] for method in methods}
    parts: dict[str, dict[str, list[float]]] = {method: {} for method in methods}
    losses: dict[str, tuple[float, float]] = {}
    memory: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        problem.save(folder)
        peak, rounds = gemm_peak(min(4096, 4 * max(m, n))), repeats
        while len(times[methods[-1]]) < rounds:
            started = time.perf_counter()
            for method in methods:
                elapsed, outcome = timed(method, problem, peers, folder)
                times[method].append(elapsed)
                for part, value in outcome.parts.items():
                    parts[method].setdefault(part, []).append(value)
                if method not in losses:
                    losses[method] = problem.losses(outcome.weight)
            if len(times[methods[-1]]) == 1:
                rounds = min(repeats, max(1, round(seconds / (time.perf_counter() - started))))
        if MEMORY_SIZES[0] <= min(m, n) and max(m, n) <= MEMORY_SIZES[1]:
            memory = {name: peak_memory(name, folder, threads) for name in MEMORY_METHODS if name in methods}
    counts = count(problem) if "bakron" in methods and max(m, n) <= COUNTED else {}
    rows = []
    for method in methods:
        row = {
            "method": method,
            "version": peers[method].version if method in peers else "",
            "seconds": " ".join(f"{value:.5g}" for value in times[method]),
            "loss": f"{losses[method][0]:.6g}",
            "loss_one_sided": f"{losses[method][1]:.6g}",
            "gemm_gflops": f"{peak / 1e9:.4g}",
            "memory": memory.get(method, ""),
        }
        row |= {part: f"{statistics.median(values):.5g}" for part, values in parts[method].items()}
        rows.append(row | (counts if method == "bakron" else {}))
    return rows


def timed(method: str, problem: Problem, peers: dict[str, Peer], folder: Path) -> tuple[float, Outcome]:
    """Seconds that the method took, and its outcome."""
    if method in peers:
        return peers[method].run(folder)
    started = time.perf_counter()
    outcome = METHODS[method](problem)
    return time.perf_counter() - started, outcome


def gemm_peak(size: int) -> float:
    """The best of three rates of a square float32 product, flops a second."""
    A, B, C = (torch.randn(size, size) for _ in range(3))
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        torch.mm(A, B, out=C)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


class Products(TorchDispatchMode):
    """Counts matrix products, and their flops."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.flops = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].rstrip("_")
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            left, right = args[-2:]
            self.products += 1
            self.flops += 2 * left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


def count(problem: Problem) -> dict[str, int]:
    """How many products and tiles one two-sided sweep has, one after the other, and the flops of the products."""
    tiles = 0
    kernel = get_kernel("auto", CPU)

    def counting(*args: Any) -> None:
        nonlocal tiles
        tiles += 1
        kernel(*args)

    U_in, U_out = (factorise(H.to(torch.float64), PERCDAMP, "H").U for H in (problem.H_in, problem.H_out))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # only this thread's products are counted
    with Products() as products:
        sweep(problem.W, problem.grid, U_in, U_out, counting)
    torch.set_num_threads(threads)
    return {"tiles": tiles, "products": products.products, "product_flops": products.flops}


def peak_memory(method: str, folder: Path, threads: int) -> int:
    """Bytes that the method needs at its peak, above the problem itself, in a fresh process."""
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue = context.Queue()
    process = context.Process(target=_run_alone, args=(method, folder, threads, answers))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{method}: measuring its memory failed, see the messages above")
    return answers.get()


def _run_alone(method: str, folder: Path, threads: int, answers: multiprocessing.Queue) -> None:
    set_threads(threads)
    METHODS[method](make_problem(1024, 1024))  # compiles; threads of libraries take their buffers
    problem = Problem.load(folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew; that of getrusage is inherited
    before = _peak_kilobytes()
    METHODS[method](problem)
    answers.put((_peak_kilobytes() - before) * 1024)


def _peak_kilobytes() -> int:
    """The largest resident size of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


# ------------------------------------------------------------------------------------------------- command

IDENTITY = ("commit", "hardware", "threads")
COLUMNS = (
    *("run", *IDENTITY, "torch", "m", "n", "method", "version", "seconds", "factorise", "sweep"),
    *("loss", "loss_one_sided", "gemm_gflops", "memory", "tiles", "products", "product_flops"),
)


def identity(threads: int) -> dict[str, str]:
    """What rows must share to be compared: the commit that last changed the solver, the machine, the threads."""
    paths = ("src/bakron/core", "src/bakron/kernels")
    commit = _git("log", "-1", "--format=%h", "--", *paths) or "unknown"
    if _git("status", "--porcelain", "--", *paths):
        commit += "-dirty"
    return {"commit": commit, "hardware": hardware(), "threads": str(threads)}


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def hardware() -> str:
    """The processor's name, cores and vector instructions."""
    name, cpuinfo = platform.processor(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    return f"{name}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def set_threads(threads: int) -> None:
    """Let torch and numba use so many."""
    torch.set_num_threads(threads)
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))


def read(results: Path) -> list[dict[str, str]]:
    """The rows measured so far."""
    if not results.exists():
        return []
    with results.open(newline="") as file:
        return list(csv.DictReader(file))


def finished(rows: Sequence[dict[str, str]], key: dict[str, str]) -> set[tuple[int, int, str]]:
    """(m, n, method) of the rows with this identity; none where the solver has changes that no commit names."""
    if key["commit"].endswith("-dirty"):
        return set()
    same = (row for row in rows if all(row[name] == key[name] for name in IDENTITY))
    return {(int(row["m"]), int(row["n"]), row["method"]) for row in same}


def append(results: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows, and the header to a new file."""
    results.parent.mkdir(parents=True, exist_ok=True)
    new = not results.exists()
    with results.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def parse_shape(text: str) -> tuple[int, int]:
    """(m, n) of "m" or "mxn"."""
    sides = [int(side) for side in text.split("x")]
    return sides[0], sides[-1]


def main() -> None:
    """Measure what is missing, or report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="M or MxN", help="rows x columns")
    parser.add_argument(
        "--methods", nargs="+", choices=[*METHODS, *PEERS], help="default: ours, and the peers given"
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds for each shape, at most")
    parser.add_argument("--seconds", type=float, default=240, help="time for the rounds of a shape, about")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peer-python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/solver.csv")
    parser.add_argument("--report", action="store_true", help="measure nothing, rewrite docs/performance.md")
    args = parser.parse_args()
    if args.report:
        from solver_report import write_report

        return write_report(read(args.results), ROOT / "docs/performance.md")

    pythons = dict(item.split("=", 1) for item in args.peer_python)
    methods = args.methods or [*METHODS, *pythons]
    if missing := [name for name in methods if name in PEERS and name not in pythons]:
        parser.error(f"--peer-python {missing[0]}=PATH is needed for {missing[0]}")
    set_threads(args.threads)
    key = identity(args.threads)
    done = finished(read(args.results), key)
    peers = {name: Peer(name, pythons[name], args.threads) for name in pythons if name in methods}
    try:
        _warm_up(methods, peers)
        for m, n in map(parse_shape, args.shapes):
            wanted = [name for name in methods if max(m, n) <= SMALL.get(name, max(m, n))]
            if all((m, n, method) in done for method in wanted):
                continue
            started = time.perf_counter()
            rows = measure_shape(m, n, wanted, peers, args.repeats, args.seconds, args.threads)
            run = time.strftime("%Y-%m-%dT%H:%M:%S")
            common = {"run": run, **key, "torch": torch.__version__, "m": m, "n": n}
            append(args.results, [common | row for row in rows])
            for row in rows:
                print(f"{m}x{n} {row['method']:20} {row['seconds']} s, loss {row['loss']}", flush=True)
            print(f"{m}x{n} took {time.perf_counter() - started:.0f} s in all", flush=True)
    finally:
        for peer in peers.values():
            peer.close()
    return None


def _warm_up(methods: Sequence[str], peers: dict[str, Peer]) -> None:
    """Compile, and let libraries set themselves up, on a small problem."""
    problem = make_problem(128, 256)
    with tempfile.TemporaryDirectory() as name:
        problem.save(Path(name))
        for method in methods:
            timed(method, problem, peers, Path(name))


if __name__ == "__main__":
    main()
