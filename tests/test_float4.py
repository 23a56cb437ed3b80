"""Claims: FP4 scales are those that compressed-tensors stores and reads back, and all storable ones are tried."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bakron.errors import FormatError
from bakron.quantizers.float4 import Float4, Float4Grid


def weights(seed: int, m: int = 8, n: int = 128) -> torch.Tensor:
    return torch.from_numpy(0.05 * np.random.default_rng(seed).standard_t(4, (m, n))).float()


def brute_force(W: torch.Tensor, grid: Float4Grid, size: int, scales: torch.Tensor) -> torch.Tensor:
    """(m, n_groups) least squared errors over all ``scales``."""
    x = W.double().view(len(W), -1, size, 1)
    errors = [(x - s * grid.levels.double()).square().amin(3).sum(2) for s in scales.double()]
    return torch.stack(errors).amin(0)


@pytest.mark.parametrize("kind", ["absmax", "mse"])
def test_compressed_tensors_reads_nvfp4_as_it_was_solved(kind: str) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    from compressed_tensors.quantization.lifecycle.forward_helpers import _dequantize

    W = weights(0)
    grid = Float4("nv", kind).fit(W)  # type: ignore[arg-type]
    codes = grid.nearest(W)
    packed = helpers.pack_fp4_to_uint8(grid.levels[codes.long()])
    levels = helpers.unpack_fp4_from_uint8(packed, *W.shape, dtype=torch.float32)
    assert grid.block_scale.dtype == torch.float8_e4m3fn and grid.global_scale is not None
    assert grid.global_scale.shape == (1,) and grid.global_scale.dtype == torch.float32
    read = _dequantize(
        levels.view(8, 8, 16), grid.block_scale.float()[..., None], global_scale=grid.global_scale
    )
    assert torch.equal(read.view_as(W), grid.values(codes))


@pytest.mark.parametrize("kind", ["absmax", "mse"])
def test_compressed_tensors_reads_mxfp4_as_it_was_solved(kind: str) -> None:
    mx = pytest.importorskip("compressed_tensors.compressors.mx_utils")
    W = weights(1)
    grid = Float4("mx", kind).fit(W)  # type: ignore[arg-type]
    assert grid.block_scale.dtype == torch.uint8 and grid.global_scale is None
    assert torch.equal(mx.decompress_mx_scale(grid.block_scale).float(), grid.scale)
    assert torch.equal(mx.compress_mx_scale(grid.scale, torch.uint8), grid.block_scale)


def test_nvfp4_absmax_is_compressed_tensors_scale() -> None:
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    W = weights(2)
    grid = Float4("nv", "absmax").fit(W)
    assert torch.equal(grid.global_scale, helpers.generate_gparam(W.min(), W.max()))
    wanted = grid.global_scale * (W.view(8, 8, 16).abs().amax(2) / 6)
    assert torch.equal(grid.block_scale.float(), wanted.to(torch.float8_e4m3fn).float())


def test_mxfp4_absmax_is_the_least_power_of_two_that_covers() -> None:
    W = weights(3)
    largest = W.view(8, 4, 32).abs().amax(2)
    scale = Float4("mx", "absmax").fit(W).scale
    assert bool(((6 * scale >= largest) & (3 * scale < largest)).all())


def test_the_search_finds_the_best_storable_scale() -> None:
    W = weights(4)
    for block, size in (("nv", 16), ("mx", 32)):
        grid = Float4(block).fit(W)  # type: ignore[arg-type]
        if block == "nv":
            numbers = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
            scales = numbers / grid.global_scale
        else:
            scales = 2.0 ** torch.arange(-20, 5)
        error = (grid.values(grid.nearest(W)) - W).double().square().view(8, -1, size).sum(2)
        assert torch.allclose(error, brute_force(W, grid, size, scales), rtol=1e-5)


@pytest.mark.parametrize("block", ["nv", "mx"])
def test_weights_that_overflow_are_refused(block: str) -> None:
    W = weights(5)
    W[1, 3] = 2e38
    with pytest.raises(FormatError, match="2e\\+38"):
        Float4(block).fit(W)  # type: ignore[arg-type]
