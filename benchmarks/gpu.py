"""Seconds of a two-sided solve against a classic one-sided GPTQ in torch, on the same device, as a Markdown table.

    python benchmarks/gpu.py --sizes 4096x4096 4096x14336 --tiles 32 64

Random correlated Hessians, 4 bits in groups of 128. Medians of ``--repeats`` warm runs, least and most in brackets.
Factors and grid are on the device from the start. The certificate of every solve is checked. Without a GPU it runs
on the CPU: use small sizes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import bakron
from bakron.core.grid import ScalarGrid
from bakron.core.hessian import KroneckerHessian
from bakron.core.linalg import factorise
from bakron.core.solution import LayerProblem, solve_problem
from bakron.core.solver import sweep
from bakron.kernels import get_kernel

PERCDAMP = 0.01
GPTQ_BLOCK = 128
CERTIFIED = 1e-4  # grid steps


def random_hessian(size: int, generator: torch.Generator) -> Tensor:
    """A (size, size) float32 Gram matrix of 2·size correlated samples with channels of unlike magnitude."""
    device = generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    mix = normal(size, size).mul_(0.5 / size**0.5)
    mix.diagonal().add_(1)
    X = (normal(2 * size, size) @ mix) * torch.exp(0.5 * normal(size))
    return X.T @ X / len(X)


def gptq_factor(H: Tensor) -> Tensor:
    """The upper triangular Cholesky factor of the damped H's inverse, in float32, by three factorisations."""
    damped = H + PERCDAMP * H.diagonal().mean() * torch.eye(len(H), device=H.device)
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)


def gptq_sweep(W: Tensor, grid: ScalarGrid, upper: Tensor) -> Tensor:
    """int16 codes of GPTQ as it is usually written: column by column, the columns after a block updated lazily."""
    W, n = W.clone(), W.shape[1]
    scale, zero = grid.scale[:, grid.group], grid.zero[:, grid.group]
    low, high = float(grid.levels[0]), float(grid.levels[-1])
    codes = torch.empty(W.shape, dtype=torch.int16, device=W.device)
    for start in range(0, n, GPTQ_BLOCK):
        end = min(start + GPTQ_BLOCK, n)
        errors = torch.empty_like(W[:, start:end])
        for j in range(start, end):
            level = (W[:, j] / scale[:, j] + zero[:, j]).round().clamp(low, high)
            codes[:, j] = level
            error = (W[:, j] - scale[:, j] * (level - zero[:, j])) / upper[j, j]
            W[:, j:end] -= torch.outer(error, upper[j, j:end])
            errors[:, j - start] = error
        W[:, end:] -= errors @ upper[start:end, end:]
    return codes


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> str:
    """Median seconds of ``work`` after one run that is not counted, with the least and the most."""
    seconds = []
    for _ in range(repeats + 1):
        _finish(device)
        start = time.perf_counter()
        work()
        _finish(device)
        seconds.append(time.perf_counter() - start)
    seconds = seconds[1:]
    return f"{statistics.median(seconds):.4f} [{min(seconds):.4f} – {max(seconds):.4f}]"


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(m: int, n: int, arguments: argparse.Namespace, device: torch.device) -> None:
    """Print the rows of one size."""
    generator = torch.Generator(device).manual_seed(0)
    W = torch.randn(m, n, generator=generator, device=device)
    H_in, H_out = random_hessian(n, generator), random_hessian(m, generator)
    grid = bakron.Integer(4, 128).fit(W)

    def row(what: str, work: Callable[[], object], note: str = "") -> None:
        print(f"| {m}×{n} | {what} | {timed(work, device, arguments.repeats)} | {note} |", flush=True)

    upper = gptq_factor(H_in)
    row("GPTQ: factor", lambda: gptq_factor(H_in))
    row("GPTQ: sweep", lambda: gptq_sweep(W, grid, upper))
    double_in, double_out = H_in.double(), H_out.double()
    U_in, U_out = factorise(double_in, PERCDAMP, "H_in").U, factorise(double_out, PERCDAMP, "H_out").U
    row("bakron: factor H_in, float64", lambda: factorise(double_in, PERCDAMP, "H_in"))
    row("bakron: factor H_out, float64", lambda: factorise(double_out, PERCDAMP, "H_out"))
    problem = LayerProblem(f"{m}×{n}", W, KroneckerHessian(H_in, H_out), PERCDAMP, PERCDAMP)
    for name in arguments.kernels:
        kernel = get_kernel(name, device)
        for tile in arguments.tiles:
            label = f"kernel {name}, tile {tile}"
            row(f"bakron: sweep, {label}", lambda k=kernel, t=tile: sweep(W, grid, U_in, U_out, k, t))
            worst = solve_problem(problem, grid, "both", kernel, tile).certificate.worst
            if not worst <= CERTIFIED:
                raise SystemExit(
                    f"{m}×{n}, {label}: certificate {worst:.3g} grid steps, expected ≤ {CERTIFIED:g}."
                )
            row(
                f"bakron: all, act-order and certificate included, {label}",
                lambda k=kernel, t=tile: solve_problem(problem, grid, "both", k, t),
                f"certificate {worst:.1e}",
            )


def main() -> None:
    """Print the device and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["4096x4096", "4096x14336"], help="d_out x d_in")
    parser.add_argument("--tiles", type=int, nargs="+", default=[64])
    parser.add_argument("--kernels", nargs="+", default=["auto"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device}"
    print(f"{where}, torch {torch.__version__}, {torch.get_num_threads()} CPU threads, float32\n")
    print("| size | what | seconds | |\n|---|---|---|---|")
    for size in arguments.sizes:
        m, n = (int(x) for x in size.split("x"))
        measure(m, n, arguments, device)


if __name__ == "__main__":
    main()
