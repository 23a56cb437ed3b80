"""Kernels in plain torch, for any device: a tile by inner anti-diagonals, a panel move by move."""

from __future__ import annotations

import torch

from bakron.core.grid import ScalarGrid
from bakron.core.refine import Panel
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


def descend_panel(p: Panel) -> int:
    """Coordinate descent on one panel; see ``core.refine.PanelKernel``. One step a move and a column."""
    columns, rows = p.E.shape
    first = int(p.levels[0]) if p.uniform else 0
    middles = (p.levels[1:] + p.levels[:-1]) / 2
    weight = p.E.new_ones(rows) if p.H_out is None else p.H_out.diagonal()
    moved = 0
    for j in range(columns):
        curvature = weight * p.H_in[j, j]
        movable = curvature > 0
        push = torch.zeros_like(weight)  # H_out times the moves made in this column
        scale = p.scale[p.group[j]]
        done = 0
        while done < rows:
            old = p.levels[p.codes[j].to(torch.int64) - first]
            slope = p.G[j] + p.H_in[j, j] * push
            position = old - torch.where(movable, slope / (curvature * scale), 0)  # level units
            if p.uniform:
                index = (position.round().clamp(p.levels[0], p.levels[-1]) - p.levels[0]).to(torch.int64)
            else:
                index = torch.bucketize(position, middles)
            new = p.levels[index]
            better = movable & ((old - position).abs() > (new - position).abs() + p.margin)
            better[:done] = False
            chosen = better.nonzero()[:, 0]
            if p.H_out is not None:  # the rows interact: one after the other
                chosen = chosen[:1]
            if not len(chosen):
                break
            step = scale[chosen] * (new[chosen] - old[chosen])
            p.codes[j, chosen] = (index[chosen] + first).to(torch.int16)
            p.E[j, chosen] += step
            if p.H_out is None:
                push[chosen] += step
            else:
                push += step * p.H_out[chosen[0]]
            moved += len(chosen)
            done = rows if p.H_out is None else int(chosen[0]) + 1
        p.G[j:] += p.H_in[j, j:, None] * push
    return moved
