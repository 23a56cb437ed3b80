"""Claims: the solver benchmark writes a row for each method, knows what it has, and reports; its baselines are fair:
classic GPTQ has our one-sided loss, the quartic rounding our two-sided one, on the same grid and damping.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import torch  # noqa: E402
from baselines import classic_gptq, quartic  # noqa: E402
from problems import PERCDAMP, Problem, make_problem  # noqa: E402
from solver import finished  # noqa: E402
from solver_report import TABLES, Measured, beyond_factors, exponent, goals, ratios, times  # noqa: E402
from tiny_models import tiny_decoder  # noqa: E402
from transforms import relative_errors  # noqa: E402

from bakron.core.hessian import KroneckerHessian  # noqa: E402
from bakron.core.linalg import factorise  # noqa: E402
from bakron.core.solution import ActOrder, LayerProblem, solve_problem  # noqa: E402
from bakron.kernels import get_kernel  # noqa: E402
from bakron.quantizers.integer import Integer  # noqa: E402


def ours(problem: Problem, act_order: ActOrder, two_sided: bool = False) -> tuple[float, float]:
    """Losses of the solver on the same problem, with the benchmark's damping."""
    hessian = KroneckerHessian(problem.H_in, problem.H_out if two_sided else None)
    layer = LayerProblem("layer", problem.W, hessian, PERCDAMP, PERCDAMP)
    kernel = get_kernel("auto", torch.device("cpu"))
    return problem.losses(solve_problem(layer, problem.grid, act_order, kernel).weight)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script wrote for a 64×48 layer."""
    path = tmp_path_factory.mktemp("bench") / "solver.csv"
    run(path)
    return path


def run(results: Path) -> str:
    """Run the script on one small shape; what it printed."""
    options = "--shapes 64x48 --repeats 2 --threads 1 --results".split()
    command = [sys.executable, "benchmarks/solver.py", *options, str(results)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_row_for_each_method(results: Path) -> None:
    rows = {row["method"]: row for row in csv.DictReader(results.open())}
    assert list(rows) == [
        *("bakron", "bakron-one-sided", "bakron-certified", "classic", "classic-transposed", "quartic")
    ]
    for row in rows.values():
        assert (row["m"], row["n"], row["threads"]) == ("64", "48", "1")
        assert len(row["seconds"].split()) == 2 and all(float(value) > 0 for value in row["seconds"].split())
        assert float(row["gemm_gflops"]) > 0 and float(row["loss"]) > 0
    parts = float(rows["bakron"]["factorise"]) + float(rows["bakron"]["sweep"])
    assert 0 < parts <= max(map(float, rows["bakron"]["seconds"].split()))
    assert int(rows["bakron"]["product_flops"]) <= 64 * 48 * (64 + 48)
    assert rows["bakron"]["loss"] == rows["bakron-certified"]["loss"]
    assert float(rows["bakron"]["loss"]) < 0.8 * float(rows["classic"]["loss"])
    one_sided = float(rows["bakron-one-sided"]["loss_one_sided"])
    for method in ("classic", "classic-transposed"):
        assert float(rows[method]["loss_one_sided"]) == pytest.approx(one_sided, rel=0.01)


def test_only_rows_of_the_same_solver_machine_and_threads_count_as_finished(results: Path) -> None:
    rows = list(csv.DictReader(results.open()))
    key = {name: rows[0][name] for name in ("commit", "hardware", "threads")} | {"commit": "c"}
    rows = [row | {"commit": "c"} for row in rows]
    assert finished(rows, key) == {(64, 48, row["method"]) for row in rows}
    for name in key:
        assert finished(rows, key | {name: "another"}) == set()
    dirty = {"commit": "c-dirty"}
    assert finished([row | dirty for row in rows], key | dirty) == set()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
def test_classic_gptq_is_our_one_sided_solve(act_order: bool, transposed: bool) -> None:
    problem = make_problem(40, 300)  # three groups, the last one short, and three blocks
    loss = problem.losses(classic_gptq(problem, transposed, act_order))[1]
    assert loss == pytest.approx(ours(problem, "in" if act_order else "none")[1], rel=0.01)
    assert loss != pytest.approx(ours(problem, "none" if act_order else "in")[1], rel=0.01)


def test_quartic_rounding_is_our_two_sided_solve() -> None:
    problem = make_problem(40, 150)
    U_in, U_out = (factorise(H.double(), PERCDAMP, "H").U for H in (problem.H_in, problem.H_out))
    loss = problem.losses(quartic(problem, U_in, U_out))[0]
    assert loss == pytest.approx(ours(problem, "none", two_sided=True)[0], rel=0.01)


def made_up(m: int, method: str, seconds: str, **more: str) -> dict[str, str]:
    """A row of the results."""
    row = dict.fromkeys(("version", "memory", "product_flops"), "")
    row |= {"run": "1", "commit": "c", "hardware": "h", "threads": "2", "torch": "t", "gemm_gflops": "100"}
    row |= {"factorise": "0.1", "sweep": "0.2", "loss": "1", "loss_one_sided": "2"}
    return row | {"m": str(m), "n": str(m), "method": method, "seconds": seconds} | more


def test_the_report_compares_within_rounds_and_says_which_goals_are_missed() -> None:
    bytes_of_factors = 2 * 8 * 2048**2
    rows = [
        made_up(1024, "bakron", "9 9 9", commit="older"),
        made_up(1024, "bakron", "1 2 3"),
        made_up(1024, "classic", "2 2 2"),
        made_up(2048, "bakron", "16 16 16", memory=str(bytes_of_factors + 7 * 4 * 2048**2)),
        made_up(2048, "classic", "32 30 28"),
    ]
    data = Measured(rows)
    assert data.shapes == [(1024, 1024), (2048, 2048)]
    assert data.ratios((1024, 1024), "bakron", "classic") == [0.5, 1, 1.5]
    assert exponent(data, "bakron") == pytest.approx(3)
    assert beyond_factors(data, (2048, 2048), "bakron") == 7
    text = goals(data)
    assert "| seconds / classic GPTQ, 1024 × 1024 | ≤ 0.8 | 1 | **no** |" in text
    assert "| seconds / classic GPTQ, 2048 × 2048 | ≤ 0.8 | 0.533 | yes |" in text
    assert "| seconds / GPTQModel, 1024 × 1024 | < 1 | not measured | – |" in text
    assert "| peak memory, in weights, beyond factors | ≤ 6 | 7 | **no** |" in text
    assert "| 1024 × 1024 | 2 (1–3) | 2 (2–2) |" in times(data)
    assert "1 (0.5–1.5)" in ratios(data)


def test_ratios_are_never_taken_across_runs() -> None:
    rows = [made_up(1024, "bakron", "1"), made_up(1024, "classic", "2")]
    rows.append(made_up(1024, "bakron", "8", run="2"))
    assert Measured(rows).ratios((1024, 1024), "bakron", "classic") == [0.5]
    assert Measured(rows[1:]).ratios((1024, 1024), "bakron", "classic") == []


def test_the_page_has_a_place_for_every_table() -> None:
    page = (ROOT / "docs/performance.md").read_text()
    for make in TABLES:
        assert page.count(f"<!-- {make.__name__} -->\n") == 1
    assert page.count("<!-- end -->") == len(TABLES)


def test_errors_of_transformed_weights_are_those_of_rounding(tmp_path: Path) -> None:
    path = tiny_decoder("llama", tmp_path / "m")
    plain, again, rotated = (
        relative_errors(str(path), names, Integer(3, 16, True, "minmax")) for names in ([], [], ["rotate"])
    )
    assert plain == again != rotated
    assert set(plain) == {*"q_proj k_proj v_proj o_proj gate_proj up_proj down_proj all".split()}
    assert all(0 < error < 1 for error in (*plain.values(), *rotated.values()))
