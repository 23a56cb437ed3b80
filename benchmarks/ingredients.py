"""What weighted scales, and coordinate descent over codes and scales, gain over the plain sweep, on real Hessian factors.

    bakron collect demo/smollm2 A --inputs static --seed 0 --calibration demo/wikipedia/calibration.jsonl
    bakron collect demo/smollm2 B --inputs static --seed 1 --calibration demo/wikipedia/calibration.jsonl
    python benchmarks/ingredients.py demo/smollm2/model.safetensors \\
        {A,B}/collected/factors/shampoo+H_in/0015.safetensors --bits 2 3 4

Solves each linear of the first factors file and prints, as geometric means over the linears, losses relative to the plain
sweep's: damped (what the sweep minimises), undamped, and undamped with the second file's factors, which no solver saw.
Seconds are of this process, relative to the plain ``solve_problem`` with the factor of H_in at hand.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from bakron.api import PERCDAMP_IN, PERCDAMP_OUT
from bakron.core.grid import ScalarGrid
from bakron.core.hessian import KroneckerHessian
from bakron.core.linalg import damped
from bakron.core.refine import Storable, descend
from bakron.core.solution import LayerProblem, solve_problem
from bakron.kernels import get_kernel, get_panel_kernel
from bakron.quantizers.integer import Integer
from bakron.run.factors import unpacked

CPU = torch.device("cpu")
Result = TypeVar("Result")
Row = tuple[float, ...]  # damped, undamped, held out, seconds


class Layer:
    """One linear with its problem, the metrics to judge by, and the rows measured so far."""

    def __init__(
        self,
        problem: LayerProblem,
        held_out: KroneckerHessian,
        bits: int,
        group_size: int,
        symmetric: bool,
    ) -> None:
        self.problem, self.bits, self.group_size, self.symmetric = problem, bits, group_size, symmetric
        assert problem.H_in is not None and problem.H_out is not None
        self.W = problem.weight
        self.H_in, self.H_out = damped(problem.H_in, PERCDAMP_IN), damped(problem.H_out, PERCDAMP_OUT)
        self.metrics = KroneckerHessian(self.H_in, self.H_out), problem.hessian, held_out
        self.rows: dict[str, Row] = {}

    def measure(self, weights: Tensor | None, label: str) -> None:
        """All that can follow a grid fitted with these column weights."""
        quantizer = Integer(self.bits, self.group_size, self.symmetric, "hessian", torch.bfloat16)
        grid = quantizer.fit(self.W, weights)

        def solve() -> Tensor:
            return solve_problem(self.problem, grid, "both", get_kernel("numba", CPU)).codes

        self.refined(grid, solve(), 1, self.H_out)  # once, to compile the kernels and to factor H_in
        codes, seconds = timed(solve)
        self.add(label, grid, codes, seconds)
        for passes in (1, 2, 4, 8):
            for name, storable in (("codes", None), ("scales and codes", quantizer.storable)):
                (moved_grid, moved), more = self.refined(grid, codes, passes, self.H_out, storable)
                self.add(f"{label}, {passes} × {name}", moved_grid, moved, seconds + more)
        assert self.problem.H_out is not None
        (_, moved), more = self.refined(grid, codes, 2, self.problem.H_out)
        self.add(f"{label}, 2 × codes with H_out undamped", grid, moved, seconds + more)

    def refined(
        self, grid: ScalarGrid, codes: Tensor, passes: int, H_out: Tensor, storable: Storable | None = None
    ) -> tuple[tuple[ScalarGrid, Tensor], float]:
        """Grid and codes after coordinate descent, and its seconds."""
        kernel = get_panel_kernel(CPU)
        return timed(
            lambda: descend(self.W, grid, codes, self.H_in, H_out, passes, kernel, storable=storable)[:2]
        )

    def add(self, label: str, grid: ScalarGrid, codes: Tensor, seconds: float) -> None:
        """Judge a solution."""
        E = grid.values(codes) - self.W
        self.rows[label] = *(metric.loss(E) for metric in self.metrics), seconds


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """The result and the process's seconds."""
    started = time.process_time()
    return work(), time.process_time() - started


def main() -> None:
    """Measure and print one table a bit width."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path)
    parser.add_argument("factors", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--bits", type=int, nargs="+", default=[3])
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--asymmetric", action="store_true")
    args = parser.parse_args()
    train, held_out = (unpacked(load_file(path)) for path in (args.factors, args.held_out))
    for bits in args.bits:
        layers: list[dict[str, Row]] = []
        with safe_open(args.weights, "pt") as weights:
            for key in train:
                if key.endswith(".H_in"):
                    name = key.removesuffix(".H_in")
                    W = weights.get_tensor(f"{name}.weight").float()
                    hessians = [
                        KroneckerHessian(file[key], file[f"{name}.H_out"]) for file in (train, held_out)
                    ]
                    problem = LayerProblem(name, W, hessians[0], PERCDAMP_IN, PERCDAMP_OUT)
                    layer = Layer(problem, hessians[1], bits, args.group_size, not args.asymmetric)
                    layer.measure(None, "sweep")
                    layer.measure(problem.column_weights(), "weighted scales")
                    layers.append(layer.rows)
        print(
            f"\n| {bits} bits, {len(layers)} linears | damped | undamped | held out | seconds |\n|---|---|---|---|---|"
        )
        for label in layers[0]:
            cells = []
            for column in range(4):
                ratios = [rows[label][column] / rows["sweep"][column] for rows in layers]
                cells.append(f"{statistics.geometric_mean(ratios):.3f}")
            print(f"| {label} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
