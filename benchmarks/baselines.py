"""What the solver is compared with: classic GPTQ in torch, and two-sided rounding at quartic cost."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from problems import GROUP_SIZE, PERCDAMP, Problem
from torch import Tensor

BLOCK = 128
QUARTIC_TILE = 16


def classic_gptq(problem: Problem, transposed: bool = False, act_order: bool = True) -> Tensor:
    """The weight (m, n) that GPTQ (arXiv 2210.17323, algorithm 1) rounds to, in float32, on the problem's scales.

    Damping, Cholesky, its inverse, the upper Cholesky factor of that; blocks of 128 columns, each rounded column by
    column, with the rest of the matrix updated once a block. Scales are given, updates are in place, and the losses
    that implementations add up are left out. Weights lie in memory row by row, as in all implementations known to
    us; ``transposed`` keeps them column by column instead, which makes the inner loop contiguous.
    """
    m, n = problem.W.shape
    H = problem.H_in.clone()
    H.diagonal().add_(PERCDAMP * H.diagonal().mean())
    group = torch.arange(n) // GROUP_SIZE
    order = torch.argsort(H.diagonal(), descending=True, stable=True) if act_order else torch.arange(n)
    H = H[order][:, order]
    groups = group[order].tolist()
    U = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H)), upper=True)
    pivots = U.diagonal().tolist()

    def columns(number: int) -> Tensor:
        return torch.empty(number, m) if transposed else torch.empty(m, number).T

    left, rounded = columns(n), columns(n)  # a row of these is a column of the weight
    left.copy_(problem.W[:, order].T)
    scale = columns(problem.scale.shape[1]).copy_(problem.scale.T)
    for start in range(0, n, BLOCK):
        end = min(start + BLOCK, n)
        block, values, errors = columns(end - start), columns(end - start), columns(end - start)
        block.copy_(left[start:end])
        inner = U[start:end, start:end]
        for i in range(end - start):
            s = scale[groups[start + i]]
            torch.div(block[i], s, out=values[i]).round_().clamp_(-8, 7).mul_(s)
            torch.sub(block[i], values[i], out=errors[i]).div_(pivots[start + i])
            block[i + 1 :].addmm_(inner[i, i + 1 :, None], errors[i : i + 1], alpha=-1)
        rounded[start:end] = values
        left[end:].addmm_(U[start:end, end:].T, errors, alpha=-1)
    weight = torch.empty_like(problem.W)
    weight[:, order] = rounded.T
    return weight


def quartic(problem: Problem, U_in: Tensor, U_out: Tensor) -> Tensor:
    """Two-sided rounding (m, n) that recomputes each 16×16 tile's targets from all errors before it.

    U_in (n, n), U_out (m, m): the unit upper triangular factors. m²n²/64 multiply-adds, as in the rounding of YAQA
    (arXiv 2505.22988), where the solver needs mn(m+n)/2. No act-order.
    """
    m, n = problem.W.shape
    U_in, U_out = U_in.to(torch.float32), U_out.to(torch.float32)
    E = torch.zeros_like(problem.W)
    scale = problem.scale[:, torch.arange(n) // GROUP_SIZE]
    for r0 in range(0, m, QUARTIC_TILE):
        r1 = min(r0 + QUARTIC_TILE, m)
        for c0 in range(0, n, QUARTIC_TILE):
            c1 = min(c0 + QUARTIC_TILE, n)
            # E of the tile itself is still zero
            feedback = U_out[:r1, r0:r1].T @ E[:r1, :c1] @ U_in[:c1, c0:c1]
            tile = (slice(r0, r1), slice(c0, c1))
            _round_tile(
                (problem.W[tile] - feedback).numpy(),
                problem.W[tile].numpy(),
                scale[tile].numpy(),
                U_out[r0:r1, r0:r1].numpy(),
                U_in[c0:c1, c0:c1].numpy(),
                E[tile].numpy(),
            )
    return problem.W + E


@njit(cache=True)
def _round_tile(target, W, scale, U_out, U_in, E):
    """Round entry by entry, feeding the errors inside the tile forward; writes E."""
    rows, columns = W.shape
    P = np.zeros_like(W)  # E U_in inside the tile
    for i in range(rows):
        for j in range(columns):
            left = np.float32(0)
            for k in range(j):
                left += E[i, k] * U_in[k, j]
            feedback = left
            for k in range(i):
                feedback += U_out[k, i] * P[k, j]
            code = min(max(np.rint((target[i, j] - feedback) / scale[i, j]), -8.0), 7.0)
            E[i, j] = scale[i, j] * code - W[i, j]
            P[i, j] = left + E[i, j]
