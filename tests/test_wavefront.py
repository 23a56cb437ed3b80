"""Claims: the sweep over block anti-diagonals gives, in float64, the codes of the entry-by-entry definition and of the
recursion, for every tile size, shape and grid, with either side absent, with the torch kernel and with the Triton one;
its sequential steps are 2(m+n) and its flops mn(m+n), plus lower orders; it never waits for the device.

Without a GPU the Triton kernel runs under Triton's interpreter (see conftest.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from math import log2
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import GRIDS, HESSIANS, Case, random_case
from torch.utils._python_dispatch import TorchDispatchMode

import bakron
from bakron.core.linalg import factorise
from bakron.core.reference import round_in_order
from bakron.core.solver import Kernel, sweep
from bakron.core.wavefront import Wavefront, WavefrontKernel, sweep_wavefront
from bakron.errors import ConfigError
from bakron.kernels import get_kernel

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
DAMP_IN, DAMP_OUT = 0.02, 0.3
SIDES = ("both", "in", "out", "none")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none")


def kernel_of(name: str, device: torch.device = CPU) -> Kernel:
    if name == "triton":
        pytest.importorskip("triton", reason="the package triton is not installed")
    return get_kernel(name, device)


def factors(case: Case, sides: str = "both") -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """U_in and U_out of the damped Hessian factors; None on a side that is absent."""
    U_in = factorise(case.tensor("H_in"), DAMP_IN, "H_in").U if sides in ("both", "in") else None
    U_out = factorise(case.tensor("H_out"), DAMP_OUT, "H_out").U if sides in ("both", "out") else None
    return U_in, U_out


def same_codes(case: Case, sides: str, kernel: Kernel, tile: int, expected: Any = None) -> bool:
    """Whether the wavefront gives the codes ``expected``, those of the definition by default."""
    W, U = case.tensor("W"), factors(case, sides)
    if expected is None:
        expected = round_in_order(W, case.grid, *U)
    return torch.equal(sweep(W, case.grid, *U, kernel, tile), expected)


# ------------------------------------------------------------------------------------------ right codes


@settings(derandomize=True, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    m=st.integers(1, 13),
    n=st.integers(1, 13),
    grid=st.sampled_from(GRIDS),
    group_size=st.sampled_from([1, 3, 100]),
    kind=st.sampled_from(HESSIANS),
    sides=st.sampled_from(SIDES),
    tile=st.sampled_from([1, 2, 3, 4, 64]),
)
def test_torch_kernel_gives_the_codes_of_the_definition(
    seed: int, m: int, n: int, grid: str, group_size: int, kind: str, sides: str, tile: int
) -> None:
    case = random_case(seed, m, n, grid, group_size, out_kind=kind)
    assert same_codes(case, sides, kernel_of("torch"), tile)


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("m, n, tile", [(1, 61, 4), (59, 1, 4), (37, 90, 4), (90, 37, 5), (64, 64, 8)])
def test_torch_kernel_gives_the_codes_of_the_recursion(sides: str, m: int, n: int, tile: int) -> None:
    case = random_case(m + n, m, n, "clipped", 7, "outliers", "low-rank")
    expected = sweep(case.tensor("W"), case.grid, *factors(case, sides), kernel_of("numba"))
    assert same_codes(case, sides, kernel_of("torch"), tile, expected)


@pytest.mark.parametrize(
    "m, n, tile, grid, sides",
    [
        (1, 1, 64, "symmetric", "both"),
        (1, 5, 2, "asymmetric", "both"),
        (6, 1, 4, "clipped", "both"),
        (5, 4, 1, "symmetric", "both"),
        (6, 9, 2, "asymmetric", "both"),
        (14, 9, 4, "nf4", "both"),
        (9, 7, 8, "halves", "both"),
        (11, 11, 4, "wide", "both"),
        (10, 9, 4, "clipped", "in"),
        (9, 10, 4, "nf4", "out"),
        (7, 6, 4, "symmetric", "none"),
    ],
)
def test_triton_kernel_gives_the_codes_of_the_definition(
    m: int, n: int, tile: int, grid: str, sides: str
) -> None:
    case = random_case(m + 100 * n, m, n, grid, 3, "outliers", "low-rank")
    device = CUDA if torch.cuda.is_available() else CPU
    if device == CUDA:
        W, U = case.tensor("W"), factors(case, sides)
        codes = sweep(W.to(device), on(case, device), *to(device, U), kernel_of("triton", device), tile)
        assert torch.equal(codes.cpu(), round_in_order(W, case.grid, *U))
    else:
        assert same_codes(case, sides, kernel_of("triton"), tile)


def test_triton_kernel_rounds_halves_to_even_like_the_others() -> None:
    W = torch.arange(-9, 9, dtype=torch.float64).view(3, 6) / 2
    case = random_case(0, 3, 6)
    grid = type(case.grid)(case.grid.levels, torch.ones(3, 1), torch.zeros(3, 1), torch.zeros(6).long())
    codes = sweep(W, grid, None, None, kernel_of("triton"), 4)
    assert torch.equal(codes, W.round().clamp(-8, 7).to(torch.int16))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from bakron.kernels.triton import _round

integers = ("leading", "n_groups", "leading_out", "leading_in", "n_levels")
for real, uniform, two_sided in (("fp32", True, True), ("fp64", False, False)):
    constants = dict(TILE=16, UNIFORM=uniform, MIDDLES=16, TWO_SIDED=two_sided, HAS_U_IN=not uniform)
    signature = {name: f"*{real}" for name in _round.arg_names} | dict.fromkeys(integers, "i32")
    signature |= {"codes": "*i16", "group": "*i64"} | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(_round, signature, constants)
    options = {"num_warps": 1, "enable_fp_fusion": True}
    assert triton.compile(source, GPUTarget("cuda", 90, 32), options).asm["cubin"]
"""


def test_triton_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_float32_passes_the_certificate(kernel: str) -> None:
    kernel_of(kernel)
    case = random_case(3, 12, 20)
    problem = [case.tensor(x).float() for x in ("W", "H_in", "H_out")]
    solution = bakron.solve(*problem, bakron.Integer(3, 8), kernel=kernel)
    assert solution.certificate.worst < 1e-4
    assert solution.weight.dtype == torch.float32 and solution.loss < solution.loss_rtn


# ------------------------------------------------------------------------------------------------ costs


class Launches(TorchDispatchMode):
    """Counts the products and their flops instead of computing them, and the reads that wait for the device."""

    PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "mv", "addmv", "addmv_", "addr_", "dot")
    WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.products = self.flops = self.waits = self.leaves = self.inner = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        self.waits += name in self.WAITS
        if name == "baddbmm_":
            count, rows, inner = args[1].shape
            self.flops += 2 * count * rows * inner * args[2].shape[2]
            self.products += 1
            return args[0]
        if name in self.PRODUCTS:
            raise AssertionError(f"a product that this test does not count: {name}")
        return func(*args, **(kwargs or {}))

    def kernel(self) -> WavefrontKernel:
        """A kernel that only counts, one launch of 2·tile − 1 inner steps."""

        def round_tiles(s: Wavefront, row: int, column: int, count: int) -> None:
            self.leaves += 1
            self.inner += 2 * s.tile - 1

        return WavefrontKernel(round_tiles)


def counted(m: int, n: int, tile: int, sides: str = "both") -> Launches:
    """What a sweep of (m, n) launches."""
    W = torch.zeros(m, n)
    U_in = torch.eye(n) if sides in ("both", "in") else None
    U_out = torch.eye(m) if sides in ("both", "out") else None
    ones = torch.ones(m, 1)
    grid = type(random_case(0, 1, 1).grid)(torch.arange(-8.0, 8.0), ones, 0 * ones, torch.zeros(n).long())
    with Launches() as launches:
        sweep_wavefront(W, grid, U_in, U_out, launches.kernel(), tile)
    return launches


@pytest.mark.parametrize(
    "m, n, tile", [(1024, 1024, 16), (512, 1024, 16), (1024, 240, 16), (1000, 520, 8), (40, 1024, 8)]
)
def test_sequential_steps_and_flops_are_of_the_promised_order(m: int, n: int, tile: int) -> None:
    launches = counted(m, n, tile)
    block_rows, block_columns = -(-m // tile), -(-n // tile)
    diagonals = block_rows + block_columns - 1
    assert launches.leaves == diagonals and launches.inner <= 2 * (m + n + 2 * tile)
    assert launches.products <= diagonals * log2(diagonals)
    useful = tile**3 * block_rows * block_columns * (block_rows + block_columns - 2)
    assert useful <= launches.flops <= useful * (1 + 6 / min(block_rows, block_columns))


@pytest.mark.parametrize("sides, share", [("in", "columns"), ("out", "rows"), ("none", "nothing")])
def test_an_identity_costs_no_products(sides: str, share: str) -> None:
    m, n, tile = 512, 1024, 16
    useful = m * n * {"columns": n - tile, "rows": m - tile, "nothing": 0}[share]
    assert useful <= counted(m, n, tile, sides).flops <= 1.2 * useful


def test_nothing_waits_for_the_device_once_the_grid_is_read() -> None:
    def waits(m: int, n: int) -> int:
        case = random_case(0, m, n)
        with Launches() as launches:
            sweep(case.tensor("W"), case.grid, *factors_once[(m, n)], kernel_of("torch"), 4)
        return launches.waits

    sizes = ((5, 5), (20, 30))
    factors_once = {size: factors(random_case(0, *size)) for size in sizes}
    assert waits(*sizes[0]) == waits(*sizes[1]) <= 3


# ------------------------------------------------------------------------------------ choice of a kernel


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bakron.kernels.triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)


def test_missing_triton_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    without_triton(monkeypatch)
    with pytest.raises(ConfigError, match=r"pip install \"bakron\[triton\]\""):
        get_kernel("triton", CUDA)


def test_auto_on_a_gpu_without_triton_is_torch_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    without_triton(monkeypatch)
    with pytest.warns(RuntimeWarning, match="kernel torch: .*triton"):
        assert get_kernel("auto", CUDA) == get_kernel("torch", CUDA)


def test_auto_on_another_device_is_torch_and_says_so() -> None:
    with pytest.warns(RuntimeWarning, match="kernel torch: .*mps"):
        assert get_kernel("auto", torch.device("mps")) == get_kernel("torch", CPU)


@pytest.mark.filterwarnings("error")
def test_auto_is_numba_on_a_cpu_and_triton_on_a_gpu() -> None:
    assert get_kernel("auto", CPU) == get_kernel("numba", CPU)
    assert kernel_of("triton") == get_kernel("auto", CUDA)


def test_triton_kernel_refuses_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, case = kernel_of("triton"), random_case(0, 4, 4)
    with pytest.raises(ConfigError, match="power of two, got 3"):
        sweep(case.tensor("W"), case.grid, *factors(case), kernel, 3)
    module = sys.modules["bakron.kernels.triton"]
    monkeypatch.setattr(module.triton.runtime, "JITFunction", type(module._round))  # as if not interpreted
    with pytest.raises(ConfigError, match="CUDA GPU, the weight is on cpu"):
        sweep(case.tensor("W"), case.grid, *factors(case), kernel, 4)


# ------------------------------------------------------------------------------------------ on a real GPU


def to(device: torch.device, tensors: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    return [None if x is None else x.to(device) for x in tensors]


def on(case: Case, device: torch.device) -> Any:
    """The case's grid on ``device``."""
    grid = case.grid
    return type(grid)(*to(device, (grid.levels, grid.scale, grid.zero, grid.group)))


@needs_cuda
@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("grid", ["clipped", "nf4"])
def test_gpu_gives_the_codes_of_the_cpu_in_float64(kernel: str, grid: str) -> None:
    case = random_case(5, 300, 200, grid, 64, "outliers", "low-rank")
    W, U = case.tensor("W"), factors(case)
    codes = sweep(W.to(CUDA), on(case, CUDA), *to(CUDA, U), kernel_of(kernel, CUDA), 32)
    assert torch.equal(codes.cpu(), sweep(W, case.grid, *U, kernel_of("numba")))


@needs_cuda
@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_gpu_passes_the_certificate_in_float32(kernel: str) -> None:
    kernel_of(kernel, CUDA)
    case = random_case(6, 512, 512, in_kind="outliers")
    problem = [case.tensor(x).float().to(CUDA) for x in ("W", "H_in", "H_out")]
    assert bakron.solve(*problem, bakron.Integer(4, 64), kernel=kernel).certificate.worst < 1e-4
