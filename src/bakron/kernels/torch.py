"""Tile kernel in plain torch, for any device: rounds a tile by inner anti-diagonals."""

from __future__ import annotations

import torch

from bakron.core.grid import ScalarGrid
from bakron.core.solver import Sweep


def round_tile(s: Sweep, r0: int, r1: int, c0: int, c1: int) -> None:
    """Round rows r0:r1, columns c0:c1 of the sweep in (r1−r0)+(c1−c0)−1 steps; see ``core.solver.TileKernel``."""
    rows, columns = r1 - r0, c1 - c0
    W, T, P, E = (x[r0:r1, c0:c1] for x in (s.W, s.T, s.P, s.E))
    done = torch.zeros_like(P)  # P of the entries that are rounded, zero elsewhere
    U_out = None if s.U_out is None else s.U_out[r0:r1, r0:r1].triu(1)
    U_in = None if s.U_in is None else s.U_in[c0:c1, c0:c1].triu(1)
    scale = s.grid.scale[r0:r1][:, s.grid.group[c0:c1]]
    zero = s.grid.zero[r0:r1][:, s.grid.group[c0:c1]]
    one_group = torch.zeros(1, dtype=torch.int64, device=W.device)
    for diagonal in range(rows + columns - 1):
        i = torch.arange(max(0, diagonal - columns + 1), min(rows, diagonal + 1), device=W.device)
        j = diagonal - i
        left = P[i, j]
        if U_in is not None:
            left = left + (E[i] * U_in[:, j].T).sum(1)
        target = T[i, j] - left
        if U_out is not None:
            target = target - (U_out[:, i] * done[:, j]).sum(0)
        cells = ScalarGrid(s.grid.levels, scale[i, j, None], zero[i, j, None], one_group)
        codes = cells.nearest(target[:, None])
        error = cells.values(codes)[:, 0] - W[i, j]
        s.codes[r0 + i, c0 + j] = codes[:, 0]
        E[i, j] = error
        done[i, j] = left + error
    P.copy_(done)
