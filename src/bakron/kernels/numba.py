"""Kernels for CPUs, compiled by numba: rounding inside a tile, and coordinate descent inside a panel.

A tile is swept in bands of 8 columns, 8 entries of an anti-diagonal at a time.
Inside a band all arrays are skewed: row s, lane c stands for entry (s − c, j0 + c), so that the 8 entries of row s lie on
one anti-diagonal, do not depend on each other, and every step is arithmetic on vectors of 8 neighbours. Entries outside
the tile are padding with zero couplings.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from bakron.core.refine import Panel
from bakron.core.solver import Sweep
from bakron.errors import ConfigError

LANES = 8
_FUSED = ("contract",)
_ABSENT = {np.dtype(t): np.empty((0, 0), t) for t in (np.float32, np.float64)}


def round_tile(s: Sweep, r0: int, r1: int, c0: int, c1: int) -> None:
    """Round rows r0:r1, columns c0:c1 of the sweep; see ``core.solver.TileKernel``. Raises ConfigError off the CPU."""
    if s.scratch is None:
        s.scratch = _arrays(s)
    _round(*s.scratch, r0, r1, c0, c1)


def _arrays(s: Sweep) -> tuple[Any, ...]:
    """The sweep's tensors as numpy arrays that share their memory."""
    if s.W.device.type != "cpu":
        raise ConfigError(
            f"kernel numba runs on the CPU, the weight is on {s.W.device}: choose kernel torch."
        )
    W = s.W.numpy()
    U = [_ABSENT[W.dtype] if U is None else U.numpy() for U in (s.U_out, s.U_in)]
    grid = [x.numpy() for x in (s.grid.scale, s.grid.zero, s.grid.group, s.grid.levels)]
    return (W, *(x.numpy() for x in (s.T, s.P, s.E, s.codes)), *U, *grid, s.grid.uniform)


def _vector(context, builder, array_type, array, index):
    """Pointer to the LANES entries of a contiguous 1-d array from ``index`` on, and their alignment in bytes."""
    start = builder.gep(context.make_array(array_type)(context, builder, array).data, [index])
    vector = ir.VectorType(context.get_data_type(array_type.dtype), LANES)
    return builder.bitcast(start, vector.as_pointer()), array_type.dtype.bitwidth // 8


@intrinsic
def _add_product(typing, y, iy, x, ix, v, iv):
    """``y[iy:iy+8] += x[ix:ix+8] * v[iv:iv+8]``, no bounds checked."""

    def emit(context, builder, signature, args):
        (py, align), (px, _), (pv, _) = (
            _vector(context, builder, signature.args[k], args[k], args[k + 1]) for k in (0, 2, 4)
        )
        y, x, v = (builder.load(p, align=align) for p in (py, px, pv))
        product = builder.fmul(x, v, flags=_FUSED)
        builder.store(builder.fadd(y, product, flags=_FUSED), py, align=align)
        return context.get_dummy_value()

    return types.void(y, iy, x, ix, v, iv), emit


@intrinsic
def _round_uniform(typing, level, E, P, T, W, scale, zero, i, low, high):
    """Round entries i:i+8 on a uniform grid: writes level and E, adds E to P; no bounds checked."""

    def emit(context, builder, signature, args):
        pointers = [_vector(context, builder, signature.args[k], args[k], args[7]) for k in range(7)]
        align = pointers[0][1]
        p, t, w, s, z = (builder.load(pointer, align=align) for pointer, _ in pointers[2:])
        vector = p.type
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)

        def all_lanes(x):
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), x, ir.IntType(32)(0))
            return builder.shuffle_vector(one, one, lanes)

        name = f"llvm.rint.v{LANES}f{8 * align}"
        rint = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(vector, [vector]), name
        )
        position = builder.fadd(builder.fdiv(builder.fsub(t, p), s), z)
        x = builder.call(rint, [position])
        low, high = all_lanes(args[8]), all_lanes(args[9])
        x = builder.select(builder.fcmp_ordered("<", x, high), x, high)
        x = builder.select(builder.fcmp_ordered(">", x, low), x, low)
        e = builder.fsub(builder.fmul(s, builder.fsub(x, z), flags=_FUSED), w, flags=_FUSED)
        for value, (pointer, _) in zip((x, e, builder.fadd(p, e)), pointers[:3], strict=True):
            builder.store(value, pointer, align=align)
        return context.get_dummy_value()

    return types.void(level, E, P, T, W, scale, zero, i, low, high), emit


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _round(W, T, P, E, codes, U_out, U_in, scale, zero, group, levels, uniform, r0, r1, c0, c1):
    rows, columns = r1 - r0, c1 - c0
    dtype = W.dtype
    steps = rows + LANES - 1
    padded = (rows + LANES - 1) // LANES * LANES
    length = (steps + LANES) * LANES + 10 * LANES  # the last diagonals reach beyond the last step
    T_, P_, W_, E_, level = (
        np.zeros(length, dtype),
        np.zeros(length, dtype),
        np.zeros(length, dtype),
        np.zeros(length, dtype),
        np.zeros(length, dtype),
    )
    scale_, zero_ = np.ones(length, dtype), np.zeros(length, dtype)
    errors = np.zeros((columns, padded), dtype)  # E of the tile, transposed: rows are contiguous
    left = np.zeros((LANES, padded), dtype)  # Σ_l E[:, l] U_in[l, j] over the bands before, by lane
    down = _superdiagonals(U_out[r0:r1, r0:r1] if U_out.size else U_out, rows)
    stride = rows + 2 * LANES
    right = np.zeros(LANES * LANES, dtype)  # the same of U_in inside the band
    for j0 in range(0, columns, LANES):
        width = min(LANES, columns - j0)
        band = c0 + j0
        left[:] = 0
        if U_in.size:
            for c in range(width):
                _add_columns(left[c], errors, U_in[c0 : c0 + j0, band + c], j0)
                for d in range(1, width - c):
                    right[d * LANES + c] = U_in[band + c, band + c + d]
                for d in range(width - c, LANES):
                    right[d * LANES + c] = 0
        for i in range(rows):
            for c in range(width):
                s = (i + c) * LANES + c
                g = group[band + c]
                T_[s] = T[r0 + i, band + c]
                P_[s] = P[r0 + i, band + c] + left[c, i]
                W_[s] = W[r0 + i, band + c]
                scale_[s] = scale[r0 + i, g]
                zero_[s] = zero[r0 + i, g]
        for step in range(steps):
            s = step * LANES
            if uniform:
                _round_uniform(level, E_, P_, T_, W_, scale_, zero_, s, levels[0], levels[-1])
            else:
                _round_search(level, E_, P_, T_, W_, scale_, zero_, s, levels)
            if U_in.size:
                for d in range(1, width):  # entry (i, j + d): d rows and d lanes further
                    _add_product(P_, s + d * (LANES + 1), right, d * LANES, E_, s)
            if U_out.size:
                first = rows - 1 - step + LANES - 1
                for d in range(1, min(rows, steps - step)):  # entry (i + d, j): d rows further
                    _add_product(T_, s + d * LANES, down, d * stride + first, P_, s)
        for i in range(rows):
            for c in range(width):
                s = (i + c) * LANES + c
                errors[j0 + c, i] = E_[s]
                E[r0 + i, band + c] = E_[s]
                P[r0 + i, band + c] = P_[s]
                codes[r0 + i, band + c] = np.int16(level[s])


@njit(nogil=True, cache=True, error_model="numpy")
def _round_search(level, E, P, T, W, scale, zero, start, levels):
    """Round 8 entries on any grid; ``level`` gets their indices."""
    for s in range(start, start + LANES):
        position = (T[s] - P[s]) / scale[s] + zero[s]
        index = 0
        while index + 1 < levels.size and position > (levels[index] + levels[index + 1]) / 2:
            index += 1
        level[s] = index
        E[s] = scale[s] * (levels[index] - zero[s]) - W[s]
        P[s] += E[s]


@njit(nogil=True, cache=True, error_model="numpy")
def _superdiagonals(U, rows):
    """−U[i, i+d] at [d, rows − 1 − i], padded by LANES − 1 zeros in front, flat: a step's lanes are neighbours."""
    stride = rows + 2 * LANES
    down = np.zeros(rows * stride, U.dtype)
    if U.size:
        for i in range(rows):
            for d in range(1, rows - i):
                down[d * stride + rows - 1 - i + LANES - 1] = -U[i, i + d]
    return down


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _add_columns(y, X, u, count):
    """y += Σ_k<count u[k] X[k], count a multiple of LANES."""
    for k in range(0, count, LANES):
        x0, x1, x2, x3 = X[k], X[k + 1], X[k + 2], X[k + 3]
        x4, x5, x6, x7 = X[k + 4], X[k + 5], X[k + 6], X[k + 7]
        u0, u1, u2, u3 = u[k], u[k + 1], u[k + 2], u[k + 3]
        u4, u5, u6, u7 = u[k + 4], u[k + 5], u[k + 6], u[k + 7]
        for i in range(y.size):
            y[i] += (u0 * x0[i] + u1 * x1[i] + u2 * x2[i] + u3 * x3[i]) + (
                u4 * x4[i] + u5 * x5[i] + u6 * x6[i] + u7 * x7[i]
            )


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
