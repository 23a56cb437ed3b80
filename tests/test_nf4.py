"""Claims: the NF4 levels are the published ones, absmax is QLoRA's scale, bad settings are named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bakron.errors import ConfigError
from bakron.quantizers.nf4 import NF4, nf4_levels

PUBLISHED = (  # QLoRA, arXiv 2305.14314, appendix E
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
)


def test_levels_are_the_published_ones() -> None:
    levels = nf4_levels()
    assert levels.dtype == torch.float64 and levels[7] == 0 and levels[0] == -1 and levels[15] == 1
    assert torch.allclose(levels, torch.tensor(PUBLISHED, dtype=torch.float64), rtol=0, atol=2e-7)


def test_absmax_scales_are_the_largest_magnitudes() -> None:
    W = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 100)))
    grid = NF4(scale="absmax").fit(W)
    assert torch.equal(grid.scale, torch.stack([W[:, :64].abs().amax(1), W[:, 64:].abs().amax(1)], 1))
    half = NF4(scale_dtype=torch.bfloat16).fit(W)
    assert torch.equal(half.scale, half.scale.bfloat16().double())


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="group_size: -3"):
        NF4(group_size=-3)
