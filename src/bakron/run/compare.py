"""Several methods on one model: one collection of statistics, one held-out text, one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bakron.errors import ConfigError
from bakron.evals.quality import Quality
from bakron.run.evaluation import Evaluation
from bakron.run.pipeline import Job
from bakron.run.plan import Plan
from bakron.run.progress import Progress, Silent
from bakron.run.rules import bits_text
from bakron.run.settings import Settings
from bakron.run.store import require_space


def compare(
    model: str | Path,
    variants: dict[str, Settings],
    evaluation: str | Path,
    work: str | Path,
    *,
    n_sequences: int | None = None,
    sequence_length: int | None = None,
    progress: Progress | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> list[dict[str, Any]]:
    """A row for the original and for each of ``variants`` (label → settings): perplexity, KL, p99, top-1, bits, seconds.

    All variants share calibration text and seed, so what is collected for one serves the others; finished pieces are
    kept in ``work`` and used again.  evaluation: held-out text.  on_plan: called with the plan before work starts.
    Raises ConfigError when the variants differ in their data, and whatever is wrong with any of them, before work starts.
    """
    _require_same_data(variants)
    work, progress = Path(work), progress or Silent()
    jobs: dict[str, Job] = {}
    decoder = None
    for label, settings in variants.items():
        jobs[label] = Job(
            str(model), settings, work / "runs" / label, progress, work / "collected", loaded=decoder
        )
        decoder = jobs[label].decoder
    if decoder is None:
        raise ConfigError("compare: expected at least one method, seen none.")
    held_out = Evaluation.of(decoder, evaluation, **_given(n_sequences, sequence_length))
    plan = _together([job.plan() for job in jobs.values()])
    if on_plan:
        on_plan(plan)
    require_space(work, plan.disk, "the work directory")
    reference, original = held_out.reference(decoder, progress)
    rows: list[dict[str, Any]] = [{"label": "original", **dataclasses.asdict(original)}]
    for label in variants:
        job = jobs.pop(label)  # so that its decoder goes when the next one comes
        if len(rows) > 1:
            job.reload()  # the variant before has changed the weights
        job.collect()
        job.solve()
        rows.append(_row(label, job, held_out.of_model(job.decoder, reference, progress)))
    return rows


def _row(label: str, job: Job, quality: Quality) -> dict[str, Any]:
    report = job.report()
    return {
        "label": label,
        "method": job.settings.method,
        "bits": job.settings.bits if len(job.by_scheme) == 1 else bits_text(job.by_scheme),
        "bits_per_weight": job.export_plan.bits_per_weight,
        **dataclasses.asdict(quality),
        "worst_certificate": max(max(row["certificate"]) for row in report),
        "solve_seconds": sum(row["seconds"] for row in report),
    }


def _require_same_data(variants: dict[str, Settings]) -> None:
    """Raise ConfigError, naming the setting, unless all variants read the same text on the same machine."""
    for name in (
        "calibration",
        "n_sequences",
        "sequence_length",
        "sampling",
        "seed",
        "device",
        "dtype",
        "offload",
    ):
        values = {getattr(settings, name) for settings in variants.values()}
        if len(values) > 1:
            raise ConfigError(
                f"compare: {name} must be the same for all methods, seen {sorted(map(str, values))}."
            )


def _together(plans: Sequence[Plan]) -> Plan:
    """One plan for all variants, at most: two models in memory, nothing shared on disk, nothing timed once."""
    largest = max(plans, key=lambda plan: plan.memory)
    seconds = [plan.seconds for plan in plans if plan.seconds is not None]
    return dataclasses.replace(
        largest,
        model_whole=2 * largest.model_whole,
        model_one_block=2 * largest.model_one_block,
        disk=sum(plan.disk for plan in plans),
        seconds=sum(seconds) if seconds else None,
    )


def _given(n_sequences: int | None, sequence_length: int | None) -> dict[str, int]:
    named = {"n_sequences": n_sequences, "sequence_length": sequence_length}
    return {name: value for name, value in named.items() if value is not None}
