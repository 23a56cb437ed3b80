"""Solve one layer on a frozen grid, undo act-order, and certify the result: the problem and its solution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid
from bakron.core.hessian import KroneckerHessian
from bakron.core.linalg import Factor, check_hessian, factorise, shrink_to_diagonal
from bakron.core.reference import round_in_order
from bakron.core.solver import TILE, TileKernel, sweep
from bakron.core.vector import VectorGrid, block_unit, round_runs_in_order, round_vectors
from bakron.errors import ConfigError, NonFiniteError, ShapeError

ActOrder = Literal["none", "in", "out", "both"]


class Certificate(NamedTuple):
    """How far the worst code is from being the nearest one to its target, in grid steps (solver.md, fact 7).

    unclipped: max of |η|/scale − ½ over unclipped codes.  clipped: its one-sided counterpart over codes at either
    end of the grid.  Both are −½ when there is no such code. A correct float32 sweep stays below 1e-4.
    """

    unclipped: float
    clipped: float

    @property
    def worst(self) -> float:
        """The larger of the two."""
        return max(self)


@dataclass(frozen=True)
class LayerProblem:
    """Round ``weight`` (d_out, d_in) in the metric of ``hessian``, damped and shrunk as said.

    percdamp_in, percdamp_out: multiples of the mean diagonal added to the diagonal.  shrink_out: share of H_out's
    off-diagonal part that is taken away before damping.  Raises ShapeError, NonFiniteError.
    """

    name: str
    weight: Tensor
    hessian: KroneckerHessian
    percdamp_in: float
    percdamp_out: float
    shrink_out: float = 0.0

    def __post_init__(self) -> None:
        if self.weight.ndim != 2:
            raise ShapeError(
                f"{self.name}: the weight must be a matrix, got shape {tuple(self.weight.shape)}."
            )
        if not torch.isfinite(self.weight).all():
            bad = int((~torch.isfinite(self.weight)).sum())
            raise NonFiniteError(
                f"{self.name}: {bad} of {self.weight.numel()} weights are NaN or infinite: the checkpoint is damaged."
            )
        for setting in ("percdamp_in", "percdamp_out", "shrink_out"):
            value = getattr(self, setting)
            if not 0 <= value < float("inf") or (setting == "shrink_out" and value > 1):
                raise ConfigError(
                    f"{self.name}: {setting} is {value}, it must be finite, ≥ 0 (shrink_out ≤ 1)."
                )

    @cached_property
    def H_in(self) -> Tensor | None:
        """The checked float64 input factor, undamped."""
        H = self.hessian.H_in
        return None if H is None else check_hessian(H, self.weight.shape[1], f"{self.name}: H_in")

    @cached_property
    def H_out(self) -> Tensor | None:
        """The checked float64 output factor, undamped and not shrunk."""
        H = self.hessian.H_out
        return None if H is None else check_hessian(H, self.weight.shape[0], f"{self.name}: H_out")

    def one_sided(self) -> LayerProblem:
        """The same problem with H_out = I: GPTQ's."""
        hessian = KroneckerHessian(self.H_in, None, self.hessian.n_sequences, self.hessian.n_tokens)
        return LayerProblem(self.name, self.weight, hessian, self.percdamp_in, self.percdamp_out)

    def loss(self, weight: Tensor) -> float:
        """f(weight − W) on the undamped Hessian."""
        return KroneckerHessian(self.H_in, self.H_out).loss(
            weight.to(torch.float64) - self.weight.to(torch.float64)
        )


@dataclass(frozen=True)
class Solution:
    """The rounded layer: ``weight`` = ``grid.values(codes)``, (d_out, d_in); codes int16 in the original order.

    damping: (percdamp_in, percdamp_out) as used.  clip_rate: share of codes at either end of the grid.
    """

    problem: LayerProblem
    grid: ScalarGrid
    codes: Tensor
    weight: Tensor
    certificate: Certificate
    damping: tuple[float, float]
    clip_rate: float
    act_order: ActOrder
    kernel: TileKernel | None

    @cached_property
    def loss(self) -> float:
        """f(Ŵ − W) = tr(H_out E H_in Eᵀ) on the undamped, unshrunk Hessian."""
        return self.problem.loss(self.weight)

    @cached_property
    def loss_rtn(self) -> float:
        """The same loss of round-to-nearest on the same grid."""
        return self.problem.loss(
            self.grid.values(self.grid.nearest(self.problem.weight.to(self.grid.scale.dtype)))
        )

    @cached_property
    def loss_gptq(self) -> float:
        """The same loss of the one-sided solution (H_out = I in the sweep) on the same grid; solved on first use."""
        if self.problem.H_out is None:
            return self.loss
        order: ActOrder = "in" if self.act_order in ("in", "both") else "none"
        return self.problem.loss(
            solve_problem(self.problem.one_sided(), self.grid, order, self.kernel).weight
        )


def solve_problem(
    problem: LayerProblem,
    grid: ScalarGrid,
    act_order: ActOrder = "both",
    kernel: TileKernel | None = None,
    tile: int = TILE,
) -> Solution:
    """Round ``problem.weight`` on the frozen ``grid``; ``kernel`` None is the entry-by-entry reference.

    A vector grid has a kernel of its own, used instead of any other; act-order then sorts runs of columns.
    The sweep runs in float64 if the weight is float64, else in float32; factorisation and certificate in float64.
    Raises ConfigError, ShapeError, NonFiniteError, NotPositiveDefiniteError.
    """
    if act_order not in ("none", "in", "out", "both"):
        raise ConfigError(f"act_order: {act_order!r} is not one of none, in, out, both.")
    W = problem.weight.detach()
    W = W if W.dtype == torch.float64 else W.to(torch.float32)
    H_in, H_out = problem.H_in, problem.H_out
    if H_out is not None:
        H_out = shrink_to_diagonal(H_out, problem.shrink_out)
    rows = _descending(H_out, W.shape[0], act_order in ("out", "both"), W.device)
    columns = _descending(H_in, W.shape[1], act_order in ("in", "both"), W.device, grid.run)
    factor_in = _factor(H_in, columns, problem.percdamp_in, f"{problem.name}: H_in")
    factor_out = _factor(H_out, rows, problem.percdamp_out, f"{problem.name}: H_out")
    U_in = None if factor_in is None else factor_in.U
    U_out = None if factor_out is None else factor_out.U

    ordered_W, ordered_grid = W[rows][:, columns], grid.permute(rows, columns)
    if isinstance(ordered_grid, VectorGrid):
        U_in = None if U_in is None else block_unit(U_in, grid.run)
        if kernel is None:
            ordered = round_runs_in_order(ordered_W, ordered_grid, U_in, U_out)
        else:
            ordered = sweep(ordered_W, ordered_grid, U_in, U_out, round_vectors, tile)
    elif kernel is None:
        ordered = round_in_order(ordered_W, ordered_grid.to(W.dtype), U_in, U_out)
    else:
        ordered = sweep(ordered_W, ordered_grid, U_in, U_out, kernel, tile)
    certificate, clip_rate = _certify(ordered_W, ordered_grid, ordered, U_in, U_out)
    codes = torch.empty_like(ordered)
    codes[rows[:, None], columns] = ordered
    return Solution(
        problem=problem,
        grid=grid,
        codes=codes,
        weight=grid.values(codes),
        certificate=certificate,
        damping=(
            factor_in.percdamp if factor_in else problem.percdamp_in,
            factor_out.percdamp if factor_out else problem.percdamp_out,
        ),
        clip_rate=clip_rate,
        act_order=act_order,
        kernel=kernel,
    )


def _descending(H: Tensor | None, size: int, ordered: bool, device: torch.device, run: int = 1) -> Tensor:
    """The indices by descending diagonal of H, ties in their original order; as they stand when not ``ordered``.

    Runs of indices stay together and are sorted by their sums.
    """
    if H is None or not ordered:
        return torch.arange(size, device=device)
    order = torch.argsort(H.diagonal().view(-1, run).sum(1), descending=True, stable=True)
    return (order[:, None] * run + torch.arange(run, device=device)).view(-1)


def _factor(H: Tensor | None, order: Tensor, percdamp: float, name: str) -> Factor | None:
    return None if H is None else factorise(H[order][:, order], percdamp, name)


def _certify(
    W: Tensor, grid: ScalarGrid, codes: Tensor, U_in: Tensor | None, U_out: Tensor | None
) -> tuple[Certificate, float]:
    """Recompute η = U_outᵀ E U_in in float64 from the codes alone and measure the worst rounding excess."""
    grid = grid.to(torch.float64)
    value = grid.values(codes)
    eta = value - W.to(torch.float64)
    if U_in is not None:
        eta = eta @ U_in
    if U_out is not None:
        eta = U_out.T @ eta
    excess, clipped = grid.excess(value - eta, codes)

    def worst(of: Tensor) -> float:
        return float(of.max().clamp(min=-0.5)) if of.numel() else -0.5

    clip_rate = float(clipped.double().mean()) if clipped.numel() else 0.0
    return Certificate(worst(excess[~clipped]), worst(excess[clipped])), clip_rate
