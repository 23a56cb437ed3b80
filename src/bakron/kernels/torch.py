"""Kernel in plain torch, for any device: rounds all tiles of a block anti-diagonal by their inner ones."""

from __future__ import annotations

import torch

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
