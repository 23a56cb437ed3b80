"""The choice of one candidate for each item that costs no more than a budget and loses least: an exact knapsack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bakron.errors import ConfigError, ShapeError

BISECTIONS = 100
ROUNDING = 1e-9  # of the losses' sum: partial choices that miss the best known one by less are kept


def allocate(losses: Sequence[Sequence[float]], costs: Sequence[Sequence[int]], budget: int) -> list[int]:
    """For each item the index of its candidate, so that Σ losses is least with Σ costs ≤ ``budget``.

    losses: finite, of each item's candidates.  costs: whole numbers ≥ 0, of the same.
    Items are added one by one to a list of partial choices, of which only those are kept that no other one undercuts in
    both cost and loss, and whose Lagrangian bound, loss + λ·cost + Σ_rest min(loss + λ·cost) − λ·budget, does not exceed a
    choice already known; λ maximises that bound for the whole. The result is exact up to the rounding of sums in float64;
    among equal ones the cheapest. Any λ is valid, a good one keeps the list short: its length grows with the number of
    distinct costs, in the worst case exponentially.

    Raises ConfigError when even the cheapest candidates exceed the budget, ShapeError when losses and costs do not match.

    >>> allocate([[9.0, 1.0], [4.0, 3.0]], [[2, 3], [2, 3]], budget=5)
    [1, 0]
    """
    loss, cost = _matrices(losses, costs)
    cheapest = int(cost.amin(1).sum()) if len(cost) else 0
    if cheapest > budget:
        raise ConfigError(f"budget: {budget} is less than {cheapest}, what the cheapest candidates cost.")
    if not len(cost):
        return []
    cost, budget = cost - cost.amin(1, keepdim=True), budget - cheapest  # what the cheapest candidates leave
    price, known = _price(loss, cost.to(torch.float64), budget)
    reduced = loss + price * cost.to(torch.float64)
    least = reduced.amin(1)
    rest = least.flip(0).cumsum(0).flip(0) - least
    limit = known + price * budget + ROUNDING * float(loss.masked_fill(loss.isinf(), 0).abs().amax(1).sum())

    total_loss, total_cost, total_reduced = loss.new_zeros(1), cost.new_zeros(1), loss.new_zeros(1)
    history: list[
        tuple[Tensor, Tensor]
    ] = []  # of each kept choice: its parent, and the candidate added to it
    for i in range(len(loss)):
        sums = [(total[:, None] + added[i]).flatten() for total, added in
                ((total_loss, loss), (total_cost, cost), (total_reduced, reduced))]  # fmt: skip
        possible = ((sums[1] <= budget) & (sums[2] + rest[i] <= limit)).nonzero()[:, 0]
        kept = possible[_undominated(sums[0][possible], sums[1][possible])]
        history.append((kept // loss.shape[1], kept % loss.shape[1]))
        total_loss, total_cost, total_reduced = (total[kept] for total in sums)

    index = len(total_loss) - 1  # by cost ascending, so by loss descending
    chosen = []
    for parent, candidate in reversed(history):
        chosen.append(int(candidate[index]))
        index = int(parent[index])
    return chosen[::-1]


def _matrices(losses: Sequence[Sequence[float]], costs: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Losses (items, k) float64 and costs int64, filled up with candidates of infinite loss."""
    width = max(map(len, losses), default=0)
    loss = torch.full((len(losses), width), torch.inf, dtype=torch.float64)
    cost = torch.zeros(len(losses), width, dtype=torch.int64)
    for i, (own_losses, own_costs) in enumerate(zip(losses, costs, strict=True)):
        n = len(own_losses)
        if n != len(own_costs) or not n:
            raise ShapeError(f"item {i}: expected as many losses as costs, seen {n} and {len(own_costs)}.")
        loss[i, :n], cost[i] = torch.tensor(own_losses, dtype=torch.float64), max(own_costs)
        cost[i, :n] = torch.tensor(own_costs, dtype=torch.int64)
        if not bool(torch.isfinite(loss[i, :n]).all()):
            raise ConfigError(f"item {i}: losses {list(own_losses)} are not all finite.")
    return loss, cost


def _price(loss: Tensor, cost: Tensor, budget: int) -> tuple[float, float]:
    """The least λ, by bisection, at which the choice of min(loss + λ·cost) is within the budget, and a loss that can be had.

    cost: of the cheapest candidates 0, so that some λ is enough.
    """

    def at(price: float) -> tuple[float, float]:
        picks = (loss + price * cost).argmin(1, keepdim=True)
        return float(cost.gather(1, picks).sum()), float(loss.gather(1, picks).sum())

    total, known = at(0.0)
    if total <= budget:
        return 0.0, known
    finite = torch.where(loss.isinf(), loss.amin(1, keepdim=True), loss)
    low, high = (
        0.0,
        2 * float((finite.amax(1) - finite.amin(1)).max()),
    )  # one of cost outweighs any difference in loss
    known = at(high)[1]
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        total, found = at(middle)
        if total <= budget:
            high, known = middle, min(known, found)
        else:
            low = middle
    return high, known


def _undominated(loss: Tensor, cost: Tensor) -> Tensor:
    """Indices of the choices that none of the others undercuts or equals in both, by cost ascending."""
    order = torch.argsort(loss, stable=True)
    order = order[torch.argsort(cost[order], stable=True)]
    best = torch.cummin(loss[order], 0).values
    before = torch.cat([best.new_full((1,), torch.inf), best[:-1]])
    return order[loss[order] < before]
