"""Kernels in plain torch, for any device: all tiles of a block anti-diagonal at once, and a panel move by move."""

from __future__ import annotations

import torch

from bakron.core.refine import Panel
from bakron.core.wavefront import Wavefront


def round_tiles(s: Wavefront, row: int, column: int, count: int) -> None:
    """Round ``count`` tiles in 2·tile − 1 steps; see ``core.wavefront.RoundTiles``."""
    b = s.tile
    W, T, P, E, codes = (s.blocks(x, row, column, count) for x in (s.W, s.T, s.P, s.E, s.codes))
    U_out = None if s.U_out is None else s.blocks(s.U_out, row, row, count)
    U_in = None if s.U_in is None else s.blocks(s.U_in, column, column, count)
    scale, zero = _per_entry(s, s.scale, row, column, count), _per_entry(s, s.zero, row, column, count)
    for offset in range(1 - b, b):  # the entries (i, i + offset): all that they depend on is done
        i = slice(max(0, -offset), min(b, b - offset))
        j = slice(i.start + offset, i.stop + offset)
        w, t, p, e, code, unit, origin = (x.diagonal(offset, 1, 2) for x in (W, T, P, E, codes, scale, zero))
        position = (t - p) / unit + origin
        if s.uniform:
            level = position.round_().clamp_(s.levels[0], s.levels[-1])
            code.copy_(level)
        else:
            index = torch.bucketize(position, s.middles)
            level = s.levels[index]
            code.copy_(index)
        e.copy_(unit * (level - origin) - w)
        if U_in is None:
            p += e
        else:
            P[:, i].addcmul_(e[:, :, None], U_in[:, j])  # its unit diagonal adds e to p
        if U_out is not None:
            T[:, :, j].addcmul_(U_out[:, :, i], p[:, None, :], value=-1)


def _per_entry(s: Wavefront, x: torch.Tensor, row: int, column: int, count: int) -> torch.Tensor:
    """The (count, tile, tile) values of ``x``, (rows, n_groups), at each entry of the tiles."""
    b = s.tile
    by_group = x[(row + s.margin) * b :][: count * b].view(count, b, -1)
    group = s.group[(column + s.margin) * b :][: count * b].view(count, 1, b)
    return by_group.gather(2, group.expand(count, b, b))


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
