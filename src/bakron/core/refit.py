"""Refit of scales: lower two-sided loss for given codes, by one step of gradient descent."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bakron.core.grid import ScalarGrid


def refit_scales(
    W: Tensor, grid: ScalarGrid, codes: Tensor, H_in: Tensor | None, H_out: Tensor | None
) -> Tensor:
    """Scales (m, n_groups) that lower f = tr(H_out E H_in Eᵀ), E = scale·C − W, with C = level − zero of ``codes`` (m, n).

    H_in (n, n), H_out (m, m): symmetric PSD, in the dtype of W; None is the identity. f is quadratic in the scales. The
    step goes along the gradient divided by the diagonal of its second derivative, as far as is best. It costs 4mn(m+n)
    flops, lowers f in exact arithmetic, and is the least squares solution where neither the groups of a row nor the rows
    interact. A group whose codes all stand for 0, or that nothing depends on, keeps its scale. Scales may come out of
    either sign and are not rounded to any type: that is the caller's.
    """
    grid = grid.to(W.dtype)
    member = one_hot(grid.group, grid.scale.shape[1]).to(W.dtype)
    C = ScalarGrid(grid.levels, torch.ones_like(grid.scale), grid.zero, grid.group).values(codes)

    def by_scale(E: Tensor) -> Tensor:
        """Half of what f's gradient at E is in the scales, (m, n_groups)."""
        right = E if H_in is None else E @ H_in
        return (C * (right if H_out is None else H_out @ right)) @ member

    curvature = torch.empty_like(grid.scale)
    for g in range(len(member.T)):
        columns = (grid.group == g).nonzero()[:, 0]
        part = C[:, columns]
        curvature[:, g] = ((part if H_in is None else part @ H_in[columns][:, columns]) * part).sum(1)
    if H_out is not None:
        curvature *= H_out.diagonal()[:, None]

    gradient = by_scale(grid.values(codes) - W)
    direction = torch.where(curvature > 0, gradient / curvature, 0)
    slope = (direction * gradient).sum()
    bend = (direction * by_scale(direction.index_select(1, grid.group) * C)).sum()
    return grid.scale - torch.where(bend > 0, slope / bend, 0) * direction
