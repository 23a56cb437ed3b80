"""Solve one layer on a frozen grid, undo act-order, and certify the result: the problem and its solution."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid
from bakron.core.hessian import KroneckerHessian
from bakron.core.linalg import Factor, check_hessian, factorise, gathered, shrink_to_diagonal
from bakron.core.parallel import Team, pieces
from bakron.core.parallel import team as whole_team
from bakron.core.reference import round_in_order
from bakron.core.solver import Kernel, sweep
from bakron.core.vector import VectorGrid, block_unit, round_runs_in_order, round_vectors
from bakron.errors import ConfigError, NonFiniteError, ShapeError, require_one_of

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
        """The larger of the two, NaN if either is."""
        return float(torch.tensor(self, dtype=torch.float64).max())


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
    _factored: dict[tuple[bool, int], tuple[Tensor, Factor | None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
        """The checked input factor, undamped."""
        H = self.hessian.H_in
        return None if H is None else check_hessian(H, self.weight.shape[1], f"{self.name}: H_in")

    @cached_property
    def H_out(self) -> Tensor | None:
        """The checked output factor, undamped and not shrunk."""
        H = self.hessian.H_out
        return None if H is None else check_hessian(H, self.weight.shape[0], f"{self.name}: H_out")

    def factor_in(
        self, act_order: ActOrder, team: Team | None = None, run: int = 1
    ) -> tuple[Tensor, Factor | None]:
        """The order of the columns (n,), and the factor of the damped H_in in that order; kept, as two steps need it.

        Runs of so many columns stay together and are ordered by their sums.  Raises NotPositiveDefiniteError, NonFiniteError.
        """
        ordered = act_order in ("in", "both")
        if (ordered, run) not in self._factored:
            self._factored[ordered, run] = self._factor(
                self.H_in, 1, "H_in", ordered, self.percdamp_in, team, run
            )
        return self._factored[ordered, run]

    def factor_out(self, act_order: ActOrder, team: Team | None = None) -> tuple[Tensor, Factor | None]:
        """The order of the rows (m,), and the factor of the shrunk and damped H_out in that order.

        Raises NotPositiveDefiniteError, NonFiniteError.
        """
        H = None if self.H_out is None else shrink_to_diagonal(self.H_out, self.shrink_out)
        return self._factor(H, 0, "H_out", act_order in ("out", "both"), self.percdamp_out, team)

    def _factor(
        self,
        H: Tensor | None,
        side: int,
        name: str,
        ordered: bool,
        percdamp: float,
        team: Team | None,
        run: int = 1,
    ) -> tuple[Tensor, Factor | None]:
        """The order by descending diagonal of H (as it stands unless ``ordered``), ties as they stand; the factor."""
        if H is None:
            return torch.arange(self.weight.shape[side], device=self.weight.device), None
        order = torch.arange(len(H), device=H.device)
        if ordered:
            order = torch.argsort(H.diagonal().view(-1, run).sum(1), descending=True, stable=True)
            order = (order[:, None] * run + torch.arange(run, device=H.device)).view(-1)
        return order, factorise(H, percdamp, f"{self.name}: {name}", order, team)

    def column_weights(self, act_order: ActOrder = "both") -> Tensor | None:
        """D_in (n,) float64 in the original order of columns: what a squared error η² of each costs in f.

        f(E) = Σ_ij D_out[i]·D_in[j]·η[i,j]², so this is the weight of a column when scales are chosen; D_out is the same
        for all columns of a row, so it has no say there. None without H_in, whose columns weigh the same.
        Raises NotPositiveDefiniteError, NonFiniteError.
        """
        columns, factor = self.factor_in(act_order)
        if factor is None:
            return None
        weights = torch.empty_like(factor.D)
        weights[columns] = factor.D
        return weights

    def one_sided(self) -> LayerProblem:
        """The same problem with H_out = I: GPTQ's."""
        hessian = KroneckerHessian(self.H_in, None, self.hessian.n_sequences, self.hessian.n_tokens)
        return LayerProblem(self.name, self.weight, hessian, self.percdamp_in, self.percdamp_out)

    def loss(self, weight: Tensor) -> float:
        """f(weight − W) on the undamped Hessian, for a float64 W in float64 (see ``KroneckerHessian.loss``)."""
        E = weight.to(torch.float64) - self.weight.to(torch.float64)
        dtype = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        return KroneckerHessian(self.H_in, self.H_out).loss(E.to(dtype))


@dataclass(frozen=True)
class Solution:
    """The rounded layer: ``weight`` = ``grid.values(codes)``, (d_out, d_in); codes int16 in the original order.

    damping: (percdamp_in, percdamp_out) as used.  clip_rate: share of codes at either end of the grid.
    fitted: the grid that the sweep rounded on; ``grid`` is another where scales were refitted to the codes.
    """

    problem: LayerProblem
    fitted: ScalarGrid
    grid: ScalarGrid
    codes: Tensor
    weight: Tensor
    certificate: Certificate
    damping: tuple[float, float]
    clip_rate: float
    act_order: ActOrder
    kernel: Kernel | None

    @cached_property
    def loss(self) -> float:
        """f(Ŵ − W) = tr(H_out E H_in Eᵀ) on the undamped, unshrunk Hessian."""
        return self.problem.loss(self.weight)

    @cached_property
    def loss_rtn(self) -> float:
        """The same loss of round-to-nearest on the fitted grid."""
        nearest = self.fitted.nearest(self.problem.weight.to(self.fitted.scale.dtype))
        return self.problem.loss(self.fitted.values(nearest))

    @cached_property
    def loss_gptq(self) -> float:
        """The same loss of the one-sided solution (H_out = I in the sweep) on the fitted grid; solved on first use."""
        if self.problem.H_out is None:
            return self.loss
        order: ActOrder = "in" if self.act_order in ("in", "both") else "none"
        return self.problem.loss(
            solve_problem(self.problem.one_sided(), self.fitted, order, self.kernel).weight
        )


def solve_problem(
    problem: LayerProblem,
    grid: ScalarGrid,
    act_order: ActOrder = "both",
    kernel: Kernel | None = None,
    tile: int | None = None,
) -> Solution:
    """Round ``problem.weight`` on the frozen ``grid``; ``kernel`` None is the entry-by-entry reference.

    A vector grid has a kernel of its own, used instead of any other; act-order then sorts runs of columns.
    The sweep runs in float64 if the weight is float64, else in float32; factorisation and certificate in float64.
    Raises ConfigError, ShapeError, NonFiniteError, NotPositiveDefiniteError.
    """
    require_one_of("act_order", act_order, get_args(ActOrder))
    W = problem.weight.detach()
    W = W if W.dtype == torch.float64 else W.to(torch.float32)
    run = grid.run
    with whole_team() as team:
        (columns, factor_in, U_in), (rows, factor_out, U_out) = sides(problem, act_order, team, run)
        ordered_W = [gathered(W, rows, columns, W.dtype, team)]  # in a list, so that the sweep can free it
    ordered_grid = grid.permute(rows, columns)
    if isinstance(ordered_grid, VectorGrid):
        U_in = None if U_in is None else block_unit(U_in, run)
        if kernel is None:
            ordered = round_runs_in_order(ordered_W.pop(), ordered_grid, U_in, U_out)
        else:
            ordered = sweep(ordered_W.pop(), ordered_grid, U_in, U_out, round_vectors, tile)
    elif kernel is None:
        ordered = round_in_order(ordered_W.pop(), ordered_grid.to(W.dtype), U_in, U_out)
    else:
        ordered = sweep(ordered_W.pop(), ordered_grid, U_in, U_out, kernel, tile)
    del U_in, U_out
    with whole_team() as team:
        certificate, clip_rate = _certify(
            W, rows, columns, ordered_grid, ordered, factor_in, factor_out, team
        )
        codes = gathered(ordered, torch.argsort(rows), torch.argsort(columns), ordered.dtype, team)
    return Solution(
        problem=problem,
        fitted=grid,
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


Side = tuple[Tensor, Factor | None, Tensor | None]
"""The order of a side, its factor in that order, and U in the dtype of the sweep; None for the identity."""


def sides(problem: LayerProblem, act_order: ActOrder, team: Team, run: int = 1) -> tuple[Side, Side]:
    """Both sides, input first; at the same time when they are about equally large.  run: see ``factor_in``."""
    dtype = torch.float64 if problem.weight.dtype == torch.float64 else torch.float32

    def side_in(team: Team) -> Side:
        order, factor = problem.factor_in(act_order, team, run)
        return order, factor, None if factor is None else factor.unit_upper(dtype, team)

    def side_out(team: Team) -> Side:
        order, factor = problem.factor_out(act_order, team)
        return order, factor, None if factor is None else factor.unit_upper(dtype, team)

    m, n = problem.weight.shape
    hessian = problem.hessian  # unchecked: each side checks its own factor
    if hessian.H_in is not None and hessian.H_out is not None and max(m, n) < 2 * min(m, n):
        return team.both(side_in, side_out)
    return side_in(team), side_out(team)


def _certify(
    W: Tensor,
    row_order: Tensor,
    column_order: Tensor,
    grid: ScalarGrid,
    codes: Tensor,
    factor_in: Factor | None,
    factor_out: Factor | None,
    team: Team,
) -> tuple[Certificate, float]:
    """Recompute η = U_outᵀ E U_in in float64 from the codes alone and measure the worst rounding excess.

    All but W are in the order of rounding.  By stripes of rows and then of columns, so that η is the only whole matrix in
    float64.
    """
    m, n = W.shape
    grid = grid.to(torch.float64)
    eta = W.new_empty(m, n, dtype=torch.float64)
    worst = {False: [eta.new_tensor(-0.5)], True: [eta.new_tensor(-0.5)]}  # by whether the code is clipped
    n_clipped: list[int] = []
    corners = None
    if grid.run > 1 and factor_in is not None and n:
        U = factor_in.U
        corners = torch.stack([U[j : j + grid.run, j : j + grid.run] for j in range(0, n, grid.run)])

    def rows(i: int, k: int) -> None:
        stripe = grid.permute(torch.arange(i, k), torch.arange(n))
        ordered_W = W.index_select(0, row_order[i:k]).index_select(1, column_order)
        E = stripe.values(codes[i:k]) - ordered_W.to(torch.float64)
        eta[i:k] = E if factor_in is None else factor_in.times(E)
        if corners is not None:  # the block unit factor's
            runs = eta[i:k].view(k - i, -1, 1, grid.run)
            runs.copy_(torch.linalg.solve_triangular(corners, runs, upper=True, left=False))

    def columns(j: int, k: int) -> None:
        stripe = grid.permute(torch.arange(m), torch.arange(j, k))
        part = eta[:, j:k] if factor_out is None else factor_out.times(eta[:, j:k].T).T
        excess, clipped = stripe.excess(stripe.values(codes[:, j:k]) - part, codes[:, j:k])
        for kind, others in ((True, ~clipped), (False, clipped)):
            worst[kind].append(excess.masked_fill(others, -0.5).amax() if m else eta.new_tensor(-0.5))
        n_clipped.append(int(clipped.sum()))

    team.run([partial(rows, i, k) for i, k in pieces(m)])
    team.run([partial(columns, j, k) for j, k in pieces(n)])
    unclipped, clipped = (float(torch.stack(worst[kind]).max()) for kind in (False, True))
    return Certificate(unclipped, clipped), sum(n_clipped) / max(m * n, 1)
