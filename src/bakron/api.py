"""``bakron.solve``: quantize one matrix, given its Hessian factors."""

from __future__ import annotations

import torch  # noqa: F401 - the example below needs it
from torch import Tensor

from bakron.core.hessian import KroneckerHessian
from bakron.core.solution import ActOrder, LayerProblem, Solution, solve_problem
from bakron.kernels import get_kernel
from bakron.quantizers import Quantizer, fitted
from bakron.quantizers.integer import Integer

PERCDAMP_IN = 0.01
PERCDAMP_OUT = 2.0  # measured: docs/experiments.md


def solve(
    W: Tensor,
    H_in: Tensor | None,
    H_out: Tensor | None = None,
    quantizer: Quantizer | None = None,
    *,
    percdamp_in: float = PERCDAMP_IN,
    percdamp_out: float = PERCDAMP_OUT,
    shrink_out: float = 0.0,
    act_order: ActOrder = "both",
    kernel: str = "auto",
    name: str = "weight",
) -> Solution:
    """Quantize ``W`` (d_out, d_in) so that f(E) = tr(H_out E H_in Eᵀ) is small, E = Ŵ − W (BaKron, arXiv 2608.06291).

    H_in: (d_in, d_in), E[xxᵀ]-like.  H_out: (d_out, d_out), E[ggᵀ]-like.  None is the identity: without H_out this is
    GPTQ, without both round-to-nearest.  quantizer: chooses the grid, ``Integer()`` by default; the grid is fitted to W
    and frozen before the sweep.  percdamp_in, percdamp_out: damping relative to the mean diagonal.  shrink_out: shrinkage
    of H_out towards its diagonal.  act_order: which sides are rounded in descending order of their diagonal.
    kernel: "auto", "reference", or one of ``bakron.kernels``.  name: used in errors.
    The sweep runs in W's dtype if it is float64, else in float32.

    Raises ShapeError, NonFiniteError, NotPositiveDefiniteError, ConfigError.

    >>> W = torch.tensor([[0.9, -0.2], [0.4, 0.6]], dtype=torch.float64)
    >>> H_in = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> bakron_solution = solve(W, H_in, quantizer=Integer(bits=3, group_size=-1))
    >>> bakron_solution.codes.tolist()
    [[-4, 1], [2, 3]]
    """
    problem = LayerProblem(name, W, KroneckerHessian(H_in, H_out), percdamp_in, percdamp_out, shrink_out)
    grid = fitted(quantizer or Integer(), W, lambda: problem.column_weights(act_order))
    return solve_problem(
        problem, grid, act_order, None if kernel == "reference" else get_kernel(kernel, W.device)
    )
