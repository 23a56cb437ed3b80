"""Independent oracles in plain numpy: dense OBS on kron(H_out, H_in), textbook GPTQ, random problems.

Nothing here uses bakron except the ``ScalarGrid`` container, and no formula is shared with it. The solver
factors each side once; ``obs`` inverts the whole (mn, mn) Hessian and eliminates one weight at a time,
``conditional_target`` minimises over the weights still free, ``gptq`` uses the Cholesky factor of H⁻¹.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bakron.core.grid import ScalarGrid

Array = NDArray[np.float64]
Order = list[tuple[int, int]]

NF4 = (
    *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
    *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0),
)
GRIDS = ("symmetric", "asymmetric", "clipped", "wide", "nf4", "halves", "offset")
HESSIANS = ("full", "low-rank", "outliers", "diagonal")


@dataclass(frozen=True)
class Case:
    """One random problem: weight (m, n), undamped factors, a grid, and the values (m, n, L) it allows."""

    W: Array
    H_in: Array
    H_out: Array
    grid: ScalarGrid
    values: Array

    @property
    def first_code(self) -> int:
        return self.grid.first_code

    def tensor(self, what: str) -> torch.Tensor:
        return torch.from_numpy(getattr(self, what).copy())


def random_hessian(rng: np.random.Generator, size: int, kind: str) -> Array:
    """A PSD (size, size) matrix, correlated unless diagonal; low-rank means a rank of about size/2."""
    if kind == "diagonal":
        return np.diag(rng.uniform(0.1, 10, size))
    samples = max(1, size // 2) if kind == "low-rank" else 2 * size + 2
    X = rng.standard_normal((samples, size)) @ (np.eye(size) + 0.7 * rng.standard_normal((size, size)))
    if kind == "outliers":
        X *= np.exp(1.5 * rng.standard_normal(size))
    return X.T @ X / samples


def random_grid(rng: np.random.Generator, W: Array, kind: str, group_size: int) -> tuple[ScalarGrid, Array]:
    """A grid with a scale (and zero) for each row and column group, and its values as a table (m, n, L)."""
    m, n = W.shape
    group = np.arange(n) // group_size
    n_groups = int(group[-1]) + 1 if n else 0
    scale = rng.uniform(0.2, 0.5, (m, n_groups))
    zero = np.zeros((m, n_groups))
    levels = np.arange(-8.0, 8.0)
    if kind == "asymmetric":
        zero = rng.integers(-4, 5, (m, n_groups)).astype(float)
    elif kind == "clipped":  # two bits that reach about half of the weights
        levels = np.arange(-2.0, 2.0)
    elif kind == "wide":  # nothing is ever clipped
        levels = np.arange(-5000.0, 5001.0)
    elif kind == "nf4":
        levels, scale = np.array(NF4), 6 * scale
    elif kind == "halves":  # consecutive, but not integers
        levels = np.arange(-4, 4) + 0.5
    if kind == "offset":  # a float minimum below consecutive codes
        levels, offset = np.arange(0.0, 16.0), rng.uniform(-4, -1, (m, n_groups))
        values = scale[:, group, None] * levels + offset[:, group, None]
        return ScalarGrid.with_offset(*(torch.from_numpy(x) for x in (levels, scale, offset, group))), values
    s, z = scale[:, group], zero[:, group]
    values = s[:, :, None] * (levels - z[:, :, None])
    tensors = (torch.from_numpy(x) for x in (levels, scale, zero, group))
    return ScalarGrid(*tensors), values


def random_case(
    seed: int,
    m: int,
    n: int,
    grid: str = "symmetric",
    group_size: int | None = None,
    in_kind: str = "full",
    out_kind: str = "full",
) -> Case:
    """The random problem of ``seed``; one group a row unless group_size says otherwise."""
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((m, n))
    scalar_grid, values = random_grid(rng, W, grid, group_size or max(n, 1))
    return Case(W, random_hessian(rng, n, in_kind), random_hessian(rng, m, out_kind), scalar_grid, values)


def damped(H: Array, percdamp: float) -> Array:
    """H with percdamp × its mean diagonal added to the diagonal."""
    return H + percdamp * np.mean(np.diag(H)) * np.eye(len(H)) if len(H) else H


def nearest(values: Array, target: float) -> int:
    """The index of the value closest to ``target``."""
    return int(np.argmin(np.abs(values - target)))


def round_to_nearest(case: Case) -> NDArray[np.int64]:
    """Codes (m, n) without any Hessian."""
    return np.argmin(np.abs(case.values - case.W[:, :, None]), axis=2) + case.first_code


def obs(
    case: Case, H_in: Array, H_out: Array, order: Iterable[tuple[int, int]] | None = None
) -> NDArray[np.int64]:
    """Codes (m, n) of Optimal Brain Surgeon on kron(H_out, H_in), which must be positive definite.

    One weight after the other, in ``order`` (row-major by default), is put on its grid; those still free move
    to where the loss is least, and the inverse Hessian loses the row and column of the fixed weight.
    """
    m, n = case.W.shape
    w = case.W.reshape(-1).copy()
    inverse = np.linalg.inv(np.kron(H_out, H_in))
    codes = np.zeros((m, n), np.int64)
    for i, j in order or [(i, j) for i in range(m) for j in range(n)]:
        q = i * n + j
        index = nearest(case.values[i, j], float(w[q]))
        codes[i, j] = index + case.first_code
        column = inverse[:, q].copy()
        w -= (w[q] - case.values[i, j, index]) / column[q] * column
        inverse -= np.outer(column, column) / column[q]
        inverse[q] = inverse[:, q] = 0
    return codes


def conditional_target(w: Array, H: Array, error: Array, fixed: list[int], q: int) -> float:
    """Where weight q wants to be: its value at the least eᵀHe over free weights, ``fixed`` given."""
    free = [k for k in range(len(w)) if k not in fixed]
    best = np.linalg.solve(H[np.ix_(free, free)], -H[np.ix_(free, fixed)] @ error[fixed])
    return float(w[q] + best[free.index(q)])


def gptq(case: Case, H_in: Array, columns: Iterable[int] | None = None) -> NDArray[np.int64]:
    """Codes (m, n) of textbook GPTQ, by the Cholesky factor of the inverse, columns in order."""
    columns = list(range(case.W.shape[1]) if columns is None else columns)
    W = case.W[:, columns].copy()
    upper = np.linalg.cholesky(np.linalg.inv(H_in[np.ix_(columns, columns)])).T
    codes = np.zeros(W.shape, np.int64)
    for position, j in enumerate(columns):
        index = np.argmin(np.abs(case.values[:, j] - W[:, position, None]), axis=1)
        codes[:, j] = index + case.first_code
        error = (W[:, position] - case.values[np.arange(len(W)), j, index]) / upper[position, position]
        W[:, position:] -= np.outer(error, upper[position, position:])
    return codes


def quadratic_form(E: Array, H_in: Array, H_out: Array) -> float:
    """vec(E)ᵀ kron(H_out, H_in) vec(E), row-major vec."""
    return float(E.reshape(-1) @ np.kron(H_out, H_in) @ E.reshape(-1))


def code_values(case: Case, codes: NDArray[np.int64]) -> Array:
    """The weights (m, n) that codes stand for."""
    return np.take_along_axis(case.values, (codes - case.first_code)[:, :, None], axis=2)[:, :, 0]


def schedules(m: int, n: int, seed: int = 0) -> dict[str, Order]:
    """Orders of all entries in which (k, l) comes before (i, j) whenever k ≤ i and l ≤ j."""
    entries = [(i, j) for i in range(m) for j in range(n)]
    return {
        "rows": entries,
        "columns": sorted(entries, key=lambda e: (e[1], e[0])),
        "anti-diagonals": sorted(entries, key=sum),
        "random": random_linear_extension(m, n, np.random.default_rng(seed)),
    }


def random_linear_extension(m: int, n: int, rng: np.random.Generator) -> Order:
    """A random such order: a row may go on while the row above is ahead of it."""
    done = [0] * m
    order: Order = []
    while len(order) < m * n:
        ready = [i for i in range(m) if done[i] < n and (i == 0 or done[i - 1] > done[i])]
        i = int(rng.choice(ready))
        order.append((i, done[i]))
        done[i] += 1
    return order


def descending(H: Array) -> list[int]:
    """Indices by descending diagonal, ties in their original order."""
    return sorted(range(len(H)), key=lambda k: -H[k, k])
