"""What a directory of Hessian factors says: size, data and spread of each, and how far another directory agrees."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from bakron.core.spectrum import agreement, spread
from bakron.errors import ConfigError, ShapeError
from bakron.run.factors import SIDES, Factors
from bakron.run.progress import Progress, Silent, stage


def show_hessians(
    directory: str | Path, other: str | Path | None = None, *, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """A row for each linear of ``directory``: name, n_sequences, n_tokens, and for H_in and H_out a dict or None.

    The dict has the size n, the fields of ``bakron.core.spectrum.Spread``, for H_out its relative ``error`` (None when
    unknown), and with an ``other`` directory those of ``Agreement``, None where it has no such factor.
    Raises ConfigError, NonFiniteError, ShapeError.
    """
    progress = progress or Silent()
    factors = Factors(directory)
    against = None if other is None else Factors(other)
    if against:
        _require_same_linears(factors, against)
    rows = []
    seen: dict[tuple[str, str], dict[str, Any] | None] = {}
    with stage(progress, "read the Hessian factors", len(factors.linears)):
        for name in factors.linears:
            row: dict[str, Any] = {"name": name, **factors.counts(name)}
            for side in SIDES:
                key = (factors.shares(name) if side == "H_in" else name, side)
                if key not in seen:
                    seen[key] = _of_side(factors, against, *key)
                row[side] = seen[key]
            rows.append(row)
            progress.advance()
    return rows


def _of_side(factors: Factors, against: Factors | None, name: str, side: str) -> dict[str, Any] | None:
    """What there is to say about one factor."""
    H = factors.load(name, side)
    if H is None:
        return None
    said = {"size": len(H), **dataclasses.asdict(spread(H))}
    if side == "H_out":
        said["error"] = factors.error_out(name, H)
    if against:
        A = against.load(name, side)
        agrees = None if A is None else agreement(H, A)
        said |= {key: getattr(agrees, key, None) for key in ("difference", "cosine")}
    return said


def _require_same_linears(factors: Factors, against: Factors) -> None:
    """Raise unless both directories have the same linears, and factors of the same sizes."""
    odd = set(factors.linears) ^ set(against.linears)
    if odd:
        name = min(odd)
        lacking = against if name in factors.linears else factors
        raise ConfigError(
            f"{lacking.path}: has no {name}, which the other has. Compare factors of one model."
        )
    for name in factors.linears:
        for side in SIDES:
            sizes = factors.size(name, side), against.size(name, side)
            if None not in sizes and sizes[0] != sizes[1]:
                raise ShapeError(
                    f"{against.path}: {name}: {side} has size {sizes[1]}, expected {sizes[0]} as in {factors.path}. "
                    "Compare factors of one model."
                )
