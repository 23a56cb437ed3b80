"""The table of benchmarks/accuracy.py: means over draws, with 95 % intervals over held-out windows.

Intervals are percentile bootstraps: windows are drawn with replacement, the same ones for all rows, so that a ratio's
interval is of its two rows on the same windows. They say how much the text that was held out matters, and nothing about
calibration, for which every draw's KL is listed. A row without calibration text is the same in every draw.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

Result = dict[str, Any]
RESAMPLES = 10_000
HEADER = [
    *("bits", "text", "row", "bits per weight", "KL (95 %)", "KL by draw", "KL / {baseline} (95 %)"),
    *("perplexity", "same top token", "seconds", "peak GB"),
]


def table(results: Sequence[Result], baseline: str) -> str:
    """A line for each grid, domain and row, in the order in which they come."""
    header = [name.format(baseline=baseline) for name in HEADER]
    lines = [_line(header), _line(["---"] * len(header))]
    cells: dict[tuple[Any, ...], dict[str, list[Result]]] = {}
    for result in results:
        cell = (result["bits"], result["group_size"], result["symmetric"], result["domain"])
        cells.setdefault(cell, {}).setdefault(result["row"], []).append(result)
    for (bits, group_size, symmetric, domain), rows in cells.items():
        grid = f"{bits}, {'symmetric' if symmetric else 'asymmetric'}, groups of {group_size}"
        for name, draws in rows.items():
            reason = next((r["not_supported"] for r in draws if "not_supported" in r), None)
            values = [f"not supported: {reason}"] if reason else _values(draws, rows.get(baseline, []))
            lines.append(_line([grid, domain, name, *values, *[""] * (len(header) - 3 - len(values))]))
    originals = {r["domain"]: r["original"] for r in results if "original" in r}
    said = ", ".join(f"{value:.2f} on {domain}" for domain, value in originals.items())
    return "\n".join(lines) + (f"\n\nThe original's perplexity is {said}." if said else "")


def interval(windows: np.ndarray, others: np.ndarray | None = None) -> tuple[float, float]:
    """95 % of the mean of windows (n,), or of its ratio to the mean of ``others`` (n,) on the same windows."""
    drawn = np.random.default_rng(0).integers(len(windows), size=(RESAMPLES, len(windows)))
    means = windows[drawn].mean(1)
    if others is not None:
        means = means / others[drawn].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def shared(rows: Sequence[Result], baseline: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """The results of both that belong to the same draws; what has no draw belongs to all of them."""
    if any(r["draw"] is None for r in rows) or any(r["draw"] is None for r in baseline):
        return list(rows), list(baseline)
    draws = {r["draw"] for r in rows} & {r["draw"] for r in baseline}
    return [r for r in rows if r["draw"] in draws], [r for r in baseline if r["draw"] in draws]


def _values(rows: list[Result], baseline: list[Result]) -> list[str]:
    rows = sorted(rows, key=lambda r: (r["draw"] is not None, r["draw"]))
    same, reference = shared(rows, [r for r in baseline if "not_supported" not in r])
    ratio = ""
    if same and reference:
        ratio = _with_interval(_kl(same) / _kl(reference), interval(_windows(same), _windows(reference)))
    perplexity, top1, seconds = (
        statistics.mean(r[name] for r in rows) for name in ("perplexity", "top1", "seconds")
    )
    return [
        f"{rows[0]['bits_per_weight']:.2f}",
        _with_interval(_kl(rows), interval(_windows(rows))),
        " ".join(f"{r['kl']:.4f}" for r in rows),
        ratio,
        f"{perplexity:.2f}",
        f"{100 * top1:.1f} %",
        ("≥ " if any(r.get("reused") for r in rows) else "") + f"{seconds:.0f}",
        f"{max(r['peak_rss'] for r in rows) / 1e9:.1f}",
    ]


def _kl(rows: Sequence[Result]) -> float:
    return float(_windows(rows).mean())


def _windows(rows: Sequence[Result]) -> np.ndarray:
    """KL of each window (n,), mean over draws."""
    return np.mean([r["kl_windows"] for r in rows], axis=0)


def _with_interval(value: float, bounds: tuple[float, float]) -> str:
    return f"{value:.4f} ({bounds[0]:.4f}–{bounds[1]:.4f})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
