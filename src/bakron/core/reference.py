"""The slow oracle: entry-by-entry two-sided rounding, straight from the definition, in any admissible order."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid


def round_in_order(
    W: Tensor,
    grid: ScalarGrid,
    U_in: Tensor | None,
    U_out: Tensor | None,
    order: Iterable[tuple[int, int]] | None = None,
) -> Tensor:
    """int16 codes (m, n) of greedy rounding on the Kronecker lattice (solver.md, section 1).

    ``order`` lists all (i, j) so that (k, l) comes before (i, j) whenever k ≤ i and l ≤ j; row-major by default.
    Costs O(m²n²): for tests and small matrices.
    """
    m, n = W.shape
    U_in = torch.eye(n, dtype=W.dtype) if U_in is None else U_in.to(W.dtype)
    U_out = torch.eye(m, dtype=W.dtype) if U_out is None else U_out.to(W.dtype)
    grid = grid.to(W.dtype)
    E = torch.zeros_like(W)
    codes = torch.zeros(m, n, dtype=torch.int16)
    for i, j in order or ((i, j) for i in range(m) for j in range(n)):
        correction = U_out[: i + 1, i] @ E[: i + 1, : j + 1] @ U_in[: j + 1, j]  # E[i, j] is still zero
        cell = ScalarGrid(grid.levels, grid.scale[i : i + 1], grid.zero[i : i + 1], grid.group[j : j + 1])
        codes[i, j] = cell.nearest((W[i, j] - correction).view(1, 1))[0, 0]
        E[i, j] = cell.values(codes[i : i + 1, j : j + 1])[0, 0] - W[i, j]
    return codes
