"""Refit of scales: those of least two-sided loss for given codes, by conjugate gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from bakron.core.grid import ScalarGrid


def refit_scales(
    W: Tensor,
    grid: ScalarGrid,
    codes: Tensor,
    H_in: Tensor | None,
    H_out: Tensor | None,
    iterations: int = 8,
) -> Tensor:
    """Scales (m, n_groups) that lower f = tr(H_out E H_in Eᵀ), E = scale·C − W, with C = level − zero of ``codes`` (m, n).

    f is quadratic in the scales. Its normal equations couple the groups of a row through H_in and the rows through H_out;
    they are solved by conjugate gradients from the grid's scales, preconditioned with each row's own (n_groups, n_groups)
    block, which is exact after one iteration when H_out is diagonal. An iteration costs 2mn(m+n) flops. A group whose
    codes all stand for 0 keeps its scale. Every iteration lowers f in exact arithmetic. Scales may come out negative and
    are not rounded to any type: that is the caller's.
    """
    m, n = W.shape
    group, n_groups = grid.group, grid.scale.shape[1]
    grid = grid.to(W.dtype)
    C = ScalarGrid(grid.levels, torch.ones_like(grid.scale), grid.zero, group).values(codes)
    H_in = torch.eye(n, dtype=W.dtype, device=W.device) if H_in is None else H_in.to(W.dtype)
    H_out = None if H_out is None else H_out.to(W.dtype)

    def over_groups(X: Tensor) -> Tensor:
        """Σ_{j in group} C[i,j]·X[i,j], (m, n_groups)."""
        return X.new_zeros(m, n_groups).index_add_(1, group, C * X)

    def gradient(E: Tensor) -> Tensor:
        right = E @ H_in
        return over_groups(right if H_out is None else H_out @ right)

    blocks = torch.empty(m, n_groups, n_groups, dtype=W.dtype, device=W.device)
    for g in range(n_groups):
        columns = (group == g).nonzero()[:, 0]
        blocks[:, g] = over_groups(C[:, columns] @ H_in[columns])
    if H_out is not None:
        blocks *= H_out.diagonal()[:, None, None]
    diagonal = blocks.diagonal(dim1=1, dim2=2)
    ridge = 1e-6 * diagonal.mean(1, keepdim=True)
    diagonal += torch.where(diagonal > 0, ridge, torch.ones_like(diagonal))
    factor = torch.linalg.cholesky(blocks)

    scale = grid.scale.clone()
    residual = -gradient(scale[:, group] * C - W)
    direction, before = torch.zeros_like(scale), 1.0
    for _ in range(iterations):
        z = torch.cholesky_solve(residual[:, :, None], factor)[:, :, 0]
        now = float((residual * z).sum())
        if now <= 0:
            break
        direction = z + (now / before) * direction
        product = gradient(direction[:, group] * C)
        step = now / float((direction * product).sum())
        scale += step * direction
        residual -= step * product
        before = now
    return scale
