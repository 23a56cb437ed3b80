"""Claims: E8's nearest point and codebook are right, runs are rounded where the dense Hessian wants them, in any order
and tile size, and the certificate refuses a wrong run.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from oracle import damped, random_hessian, schedules

from bakron.core.hessian import KroneckerHessian
from bakron.core.linalg import factorise
from bakron.core.solution import LayerProblem, solve_problem
from bakron.core.solver import Sweep, sweep
from bakron.core.vector import (
    VectorGrid,
    block_unit,
    nearest_codes,
    nearest_e8,
    round_runs_in_order,
    round_vectors,
)
from bakron.errors import ConfigError, FormatError
from bakron.quantizers.e8 import E8

DAMP_IN, DAMP_OUT = 0.02, 0.3


def case(
    seed: int, m: int, n: int, **settings: object
) -> tuple[torch.Tensor, VectorGrid, np.ndarray, np.ndarray]:
    """Weight, grid, and undamped H_in and H_out."""
    rng = np.random.default_rng(seed)
    W = torch.from_numpy(rng.standard_normal((m, n)))
    return W, E8(**settings).fit(W), random_hessian(rng, n, "full"), random_hessian(rng, m, "full")  # type: ignore[arg-type]


@cache
def codebook(radius: int) -> torch.Tensor:
    """Twice all points of E8 of squared norm ≤ radius, by enumeration: int16 (L, 8)."""
    limit, found = 4 * radius, []
    for parity in (0, 1):
        steps = torch.tensor([x for x in range(-limit, limit + 1) if x * x <= limit and x % 2 == parity])
        partial = torch.zeros(1, 0, dtype=torch.int64)
        for _ in range(8):
            partial = torch.cat(
                [partial.repeat_interleave(len(steps), 0), steps.repeat(len(partial))[:, None]], 1
            )
            partial = partial[partial.square().sum(1) <= limit]
        found.append(partial[partial.sum(1) % 4 == 0])
    return torch.cat(found).to(torch.int16)


def factors(H_in: np.ndarray, H_out: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    U_in, U_out = (
        factorise(torch.from_numpy(H), percdamp, "H").U
        for H, percdamp in ((H_in, DAMP_IN), (H_out, DAMP_OUT))
    )
    return block_unit(U_in, 8), U_out


def test_balls_hold_the_shells_of_e8_and_indices_of_8_and_16_bits() -> None:
    for radius, sizes in ((2, [1, 240]), (10, [1, 240, 2160, 6720, 17520, 30240])):
        book = codebook(radius).to(torch.int64)
        norms = book.square().sum(1) // 4
        assert [int((norms == 2 * k).sum()) for k in range(len(sizes))] == sizes
        assert len(book) == sum(sizes) == len(book.unique(dim=0)) <= 2 ** (8 if radius == 2 else 16)


def test_nearest_is_the_closest_of_all_points() -> None:
    rng = np.random.default_rng(0)
    points = torch.from_numpy(rng.standard_normal((300, 8)) * rng.uniform(0.2, 1.5, (300, 1)))
    book = codebook(10).double() / 2
    for radius in (2, 10):
        inside = book[book.square().sum(1) <= radius]
        distance = torch.cdist(points, inside)
        codes, clipped = nearest_codes(points, radius)
        assert torch.equal(codes.double() / 2, inside[distance.argmin(1)])
        assert 0 < int(clipped.sum()) < 300
    free = points.norm(dim=1) < 2  # their nearest point of the whole lattice has squared norm ≤ 10
    assert torch.equal(nearest_e8(points)[free], book[torch.cdist(points, book).argmin(1)][free])


def test_block_factors_have_identities_on_the_diagonal_and_rebuild_the_hessian() -> None:
    H = torch.from_numpy(random_hessian(np.random.default_rng(1), 24, "full"))
    factor = factorise(H, 0.0, "H")
    U = block_unit(factor.U, 8)
    D = torch.linalg.inv(U) @ H @ torch.linalg.inv(U).T
    blocks = torch.block_diag(*[torch.ones(8, 8)] * 3).bool()
    assert torch.allclose(U[blocks].view(3, 8, 8), torch.eye(8).double().expand(3, 8, 8), atol=1e-12)
    assert float(D[~blocks].abs().max()) < 1e-9 * float(H.abs().max()) and not U.tril(-1)[~blocks].any()


@pytest.mark.parametrize("bits", [1, 2])
def test_every_run_is_rounded_from_where_the_dense_loss_is_least(bits: int) -> None:
    W, grid, H_in, H_out = case(2, 3, 24, bits=bits, group_size=16)
    codes = round_runs_in_order(W, grid, *factors(H_in, H_out))
    H = np.kron(damped(H_out, DAMP_OUT), damped(H_in, DAMP_IN))
    error = (grid.values(codes) - W).numpy().reshape(-1)
    for start in range(0, W.numel(), 8):
        fixed, free = list(range(start)), list(range(start, W.numel()))
        best = np.linalg.solve(H[np.ix_(free, free)], -H[np.ix_(free, fixed)] @ error[fixed])
        row, columns = start // 24, torch.arange(start % 24, start % 24 + 8)
        cell = grid.permute(torch.tensor([row]), columns)
        target = W[row, columns] + torch.from_numpy(best[:8])
        assert torch.equal(cell.nearest(target[None])[0], codes[row, columns])


@pytest.mark.parametrize("tile", [8, 16, 64])
def test_the_sweep_gives_the_codes_of_every_order(tile: int) -> None:
    W, grid, H_in, H_out = case(3, 7, 40, group_size=8)
    U_in, U_out = factors(H_in, H_out)
    codes = sweep(W, grid, U_in, U_out, round_vectors, tile)
    for order in schedules(7, 5).values():
        assert torch.equal(round_runs_in_order(W, grid, U_in, U_out, order), codes)
    assert torch.equal(
        sweep(W, grid, U_in, None, round_vectors, tile), round_runs_in_order(W, grid, U_in, None)
    )
    assert torch.equal(sweep(W, grid, None, None, round_vectors, tile), grid.nearest(W))


@pytest.mark.parametrize("kernel", [None, round_vectors])
def test_the_certificate_refuses_a_wrong_run(kernel: object, monkeypatch: pytest.MonkeyPatch) -> None:
    W, grid, H_in, H_out = case(4, 6, 32)
    problem = LayerProblem(
        "layer", W, KroneckerHessian(torch.from_numpy(H_in), torch.from_numpy(H_out)), 0.01, 0.1
    )
    solution = solve_problem(problem, grid, "both", kernel)  # type: ignore[arg-type]
    assert solution.certificate.worst < 1e-9 and solution.loss < solution.loss_rtn
    assert solution.loss < solution.loss_gptq

    def wrong(s: Sweep, r0: int, r1: int, c0: int, c1: int) -> None:
        round_vectors(s, r0, r1, c0, c1)
        s.codes[2, 8:16] = -s.codes[2, 8:16]

    monkeypatch.setattr("bakron.core.solution.round_vectors", wrong)
    assert solve_problem(problem, grid, "both", round_vectors).certificate.worst > 0.1


@pytest.mark.parametrize("settings, word", [({"bits": 3}, "bits"), ({"group_size": 12}, "group_size")])
def test_bad_settings_are_named(settings: dict[str, int], word: str) -> None:
    with pytest.raises(ConfigError, match=f"{word}: {settings[word]}"):
        E8(**settings)  # type: ignore[arg-type]


def test_columns_must_be_whole_runs() -> None:
    with pytest.raises(FormatError, match="runs of 8 columns, the weight has 20"):
        E8().fit(torch.zeros(2, 20))
