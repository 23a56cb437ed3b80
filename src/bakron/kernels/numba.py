"""Tile kernel for CPUs, compiled by numba: a column sweep that vectorises over the rows of the tile."""

from __future__ import annotations

import numpy as np
from numba import njit

from bakron.core.solver import Sweep
from bakron.errors import ConfigError

_ABSENT = {np.dtype(t): np.empty((0, 0), t) for t in (np.float32, np.float64)}


def round_tile(s: Sweep, r0: int, r1: int, c0: int, c1: int) -> None:
    """Round rows r0:r1, columns c0:c1 of the sweep; see ``core.solver.TileKernel``. Raises ConfigError off the CPU."""
    if s.W.device.type != "cpu":
        raise ConfigError(
            f"kernel numba runs on the CPU, the weight is on {s.W.device}: choose kernel torch."
        )
    W = s.W.numpy()
    absent = _ABSENT[W.dtype]
    _round(
        W[r0:r1, c0:c1],
        s.T.numpy()[r0:r1, c0:c1],
        s.P.numpy()[r0:r1, c0:c1],
        s.E.numpy()[r0:r1, c0:c1],
        s.codes.numpy()[r0:r1, c0:c1],
        absent if s.U_out is None else s.U_out.numpy()[r0:r1, r0:r1],
        absent if s.U_in is None else s.U_in.numpy()[c0:c1, c0:c1],
        s.grid.scale.numpy()[r0:r1],
        s.grid.zero.numpy()[r0:r1],
        s.grid.group.numpy()[c0:c1],
        s.grid.levels.numpy(),
        s.grid.uniform,
    )


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _round(W, T, P, E, codes, U_out, U_in, scale, zero, group, levels, uniform):
    rows, columns = W.shape
    errors = np.empty((columns, rows), W.dtype)  # E of the tile, transposed: rows are contiguous
    left = np.empty(rows, W.dtype)
    target = np.empty(rows, W.dtype)
    low, high = levels[0], levels[-1]
    for j in range(columns):
        for i in range(rows):
            left[i] = P[i, j]
        if U_in.size:
            for k in range(j):
                u = U_in[k, j]
                for i in range(rows):
                    left[i] += errors[k, i] * u
        for i in range(rows):
            target[i] = T[i, j] - left[i]
        g = group[j]
        for i in range(rows):
            position = target[i] / scale[i, g] + zero[i, g]
            if uniform:
                level = min(max(np.rint(position), low), high)
                codes[i, j] = np.int16(level)
            else:
                index = 0
                while index + 1 < levels.size and position > (levels[index] + levels[index + 1]) / 2:
                    index += 1
                level = levels[index]
                codes[i, j] = np.int16(index)
            error = scale[i, g] * (level - zero[i, g]) - W[i, j]
            errors[j, i] = error
            E[i, j] = error
            done = left[i] + error
            P[i, j] = done
            if U_out.size:
                for k in range(i + 1, rows):
                    target[k] -= U_out[i, k] * done
