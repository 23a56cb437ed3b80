"""Kernels for CPUs, compiled by numba: rounding inside a tile, and coordinate descent inside a panel."""

from __future__ import annotations

import numpy as np
from numba import njit

from bakron.core.refine import Panel
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


def descend_panel(p: Panel) -> int:
    """Coordinate descent on one panel; see ``core.refine.PanelKernel``. Raises ConfigError off the CPU."""
    if p.E.device.type != "cpu":
        raise ConfigError(
            f"kernel numba runs on the CPU, the weight is on {p.E.device}: choose kernel torch."
        )
    E = p.E.numpy()
    return _descend(
        p.codes.numpy(),
        E,
        p.G.numpy(),
        p.H_in.numpy(),
        _ABSENT[E.dtype] if p.H_out is None else p.H_out.numpy(),
        p.scale.numpy(),
        p.group.numpy(),
        p.levels.numpy(),
        p.uniform,
        p.margin,
    )


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _descend(codes, E, G, H_in, H_out, scale, group, levels, uniform, margin):
    columns, rows = E.shape
    first, low, high = np.int16(levels[0]) if uniform else np.int16(0), levels[0], levels[-1]
    push = np.empty(rows, E.dtype)  # H_out times the moves made in this column
    moved = 0
    for j in range(columns):
        h = H_in[j, j]
        if not h > 0:
            continue
        g = group[j]
        push[:] = 0
        before = moved
        for i in range(rows):
            a = H_out[i, i] if H_out.size else E.dtype.type(1)
            if not a > 0:
                continue
            old = levels[codes[j, i] - first]
            position = old - (G[j, i] + h * push[i]) / (a * h * scale[g, i])  # level units
            if uniform:
                new = min(max(np.rint(position), low), high)
                index = np.int16(new) - first
            else:
                index = 0
                while index + 1 < levels.size and position > (levels[index] + levels[index + 1]) / 2:
                    index += 1
                new = levels[index]
            if abs(old - position) <= abs(new - position) + margin:
                continue
            step = scale[g, i] * (new - old)
            codes[j, i] = first + index
            E[j, i] += step
            moved += 1
            if H_out.size:
                for k in range(rows):
                    push[k] += step * H_out[i, k]
            else:
                push[i] += step
        if moved > before:
            for k in range(j, columns):
                u = H_in[j, k]
                for i in range(rows):
                    G[k, i] += u * push[i]
    return moved
