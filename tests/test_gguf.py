"""Claims: packed blocks dequantize to the solved weight bit for bit, scales are on the formats' lattices, the search
beats the gguf package's own quantizer, and columns that are not whole blocks are refused.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import bakron
from bakron.errors import FormatError
from bakron.quantizers.gguf import KINDS, Gguf, GgufGrid, pack
from bakron.quantizers.gguf.kinds import grid_of

kinds = pytest.mark.parametrize("kind", list(KINDS))


def weights(seed: int, m: int = 6, n: int = 512) -> torch.Tensor:
    """Rows of different sizes, one of zeros, one constant, one of a single sign, one with a block of zeros."""
    rng = np.random.default_rng(seed)
    W = torch.from_numpy(0.05 * np.exp(rng.standard_normal((m, 1))) * rng.standard_normal((m, n))).float()
    W[0], W[1], W[2], W[3, :256] = 0, -0.3, W[2].abs(), 0
    return W


def dequantized(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    gguf = pytest.importorskip("gguf")
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_hold_every_code_exactly(kind: str, dtype: torch.dtype) -> None:
    grid = Gguf(kind).fit(weights(0).to(dtype))  # type: ignore[arg-type]
    low, high = KINDS[kind].low, KINDS[kind].high
    codes = torch.from_numpy(np.random.default_rng(1).integers(low, high + 1, (6, 512))).to(torch.int16)
    assert torch.equal(dequantized(kind, pack(grid, codes)), grid.values(codes).float())


@kinds
def test_every_sub_scale_and_minimum_is_held_exactly(kind: str) -> None:
    rng = np.random.default_rng(2)
    grid, form = Gguf(kind).fit(weights(0)), KINDS[kind]  # type: ignore[arg-type]
    sub = torch.from_numpy(rng.integers(1, form.sub_max + 1, grid.sub.shape)).to(torch.int16)
    if not form.minimum and form.low != -form.high:
        sub *= torch.from_numpy(rng.choice([-1, 1], grid.sub.shape)).to(torch.int16)
    submin = torch.from_numpy(rng.integers(form.sub_max == 1, form.sub_max + 1, grid.sub.shape)).to(
        torch.int16
    )
    grid = grid_of(kind, torch.float32, grid.d, grid.dmin, sub, submin)
    codes = torch.from_numpy(rng.integers(form.low, form.high + 1, (6, 512))).to(torch.int16)
    assert torch.equal(dequantized(kind, pack(grid, codes)), grid.values(codes))


@kinds
def test_a_solved_weight_is_what_llama_cpp_reads(kind: str) -> None:
    W = weights(3)
    rng = np.random.default_rng(3)
    X, G = (
        torch.from_numpy(rng.standard_normal((64, size)) @ rng.standard_normal((size, size)))
        for size in (512, 6)
    )
    solution = bakron.solve(W, X.T @ X, G.T @ G, quantizer=Gguf(kind))  # type: ignore[arg-type]
    assert isinstance(solution.grid, GgufGrid) and solution.certificate.worst < 1e-4
    assert torch.equal(dequantized(kind, pack(solution.grid, solution.codes)), solution.weight)


@kinds
def test_scales_are_on_the_lattice_of_the_format(kind: str) -> None:
    form = KINDS[kind]
    for setting in ("absmax", "mse"):
        grid = Gguf(kind, setting).fit(weights(4))  # type: ignore[arg-type]
        assert grid.d.dtype == grid.dmin.dtype == torch.float16 and bool((grid.d > 0).all())
        assert 1 <= int(grid.sub.abs().min()) <= int(grid.sub.abs().max()) <= form.sub_max
        assert 0 <= int(grid.submin.min()) <= int(grid.submin.max()) <= form.sub_max
        scale = grid.d.double().repeat_interleave(form.parts, 1) * grid.sub.abs()
        assert torch.equal(grid.scale.double(), scale)
        if form.minimum:
            minimum = grid.dmin.double().repeat_interleave(form.parts, 1) * grid.submin
            assert grid.offset is not None and torch.equal(grid.offset.double(), -minimum)
        else:
            assert torch.equal(grid.zero, -(grid.sub < 0).float()) and grid.offset is None


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_the_search_beats_the_package_s_rounding(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    W = torch.from_numpy(np.random.default_rng(5).standard_normal((16, 256))).float()
    theirs = dequantized(
        kind, torch.from_numpy(gguf.quants.quantize(W.numpy(), gguf.GGMLQuantizationType[kind]))
    )
    grid = Gguf(kind).fit(W)  # type: ignore[arg-type]
    ours = grid.values(grid.nearest(W))
    assert float((ours - W).square().sum()) < 0.95 * float((theirs - W).square().sum())


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q3_K", "Q6_K"])
def test_the_longer_end_of_a_range_serves_the_largest_weights(kind: str) -> None:
    W = torch.full((2, 256), 0.01)
    W[:, ::16] = torch.tensor([[1.0], [-1.0]])
    grid = Gguf(kind, "absmax").fit(W)  # type: ignore[arg-type]
    assert grid.nearest(W)[0, 0] == KINDS[kind].high and grid.nearest(W)[1, 0] == KINDS[kind].low
    assert bool((grid.zero[0] == -1).all()) and not grid.zero[1].any()


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q4_K"])
def test_levels_far_from_zero_are_no_finer_than_float32_resolves(kind: str) -> None:
    W = 5 + 1e-5 * torch.from_numpy(np.random.default_rng(8).standard_normal((4, 256))).float()
    W[2:] *= -1
    solution = bakron.solve(W, torch.eye(256) + 0.5, torch.eye(4) + 0.5, quantizer=Gguf(kind))  # type: ignore[arg-type]
    assert solution.certificate.worst < 1e-4
    assert float((solution.weight - W).abs().max()) < 0.2


@kinds
@pytest.mark.parametrize("n", [31, 33, 128])
def test_columns_must_be_whole_blocks(kind: str, n: int) -> None:
    if n % KINDS[kind].columns:
        with pytest.raises(FormatError, match=f"{kind}.*blocks of {KINDS[kind].columns} columns.*{n}"):
            Gguf(kind).fit(torch.zeros(2, n))  # type: ignore[arg-type]


@kinds
def test_weights_beyond_fp16_are_refused(kind: str) -> None:
    W = weights(6)
    W[4, 7] = 1e12
    with pytest.raises(FormatError, match=f"{kind}.*1e\\+12.*fp16"):
        Gguf(kind).fit(W)  # type: ignore[arg-type]


def test_codes_of_another_shape_or_range_are_refused() -> None:
    grid = Gguf("Q4_0").fit(weights(7))
    for codes in (torch.zeros(6, 256, dtype=torch.int16), torch.full((6, 512), 8, dtype=torch.int16)):
        with pytest.raises(FormatError, match="expected \\(6, 512\\) codes from -8 to 7"):
            pack(grid, codes)
