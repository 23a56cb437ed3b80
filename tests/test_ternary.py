"""Claims: the ternary scale is the best of all, scales are stored as they are, bad settings are named."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from bakron.errors import ConfigError
from bakron.quantizers.ternary import Ternary


def test_the_scale_is_the_best_of_all_roundings() -> None:
    patterns = np.array(list(product((-1, 0, 1), repeat=6)), dtype=float)
    for seed in range(20):
        w = np.random.default_rng(seed).standard_t(3, 6)
        fits = patterns @ w / np.maximum((patterns**2).sum(1), 1)
        best = np.square(patterns * np.maximum(fits, 0)[:, None] - w).sum(1).min()
        W = torch.from_numpy(w)[None]
        grid = Ternary().fit(W)
        assert float((grid.values(grid.nearest(W)) - W).square().sum()) == pytest.approx(best, rel=1e-9)


def test_codes_are_signs_and_scales_are_storable() -> None:
    W = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 300))).float()
    for kind in ("absmax", "mse"):
        grid = Ternary(256, kind, torch.float16).fit(W)  # type: ignore[arg-type]
        assert grid.levels.tolist() == [-1, 0, 1] and grid.uniform and grid.scale.shape == (5, 2)
        assert torch.equal(grid.scale, grid.scale.half().float()) and not grid.zero.any()
    assert torch.equal(Ternary(256, "absmax").fit(W).scale[:, 1], W[:, 256:].abs().amax(1))


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="group_size: 0"):
        Ternary(group_size=0)
