"""Several methods on one model: one collection of statistics, one held-out text, one table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bakron.errors import ConfigError
from bakron.evals.quality import Quality, Reference
from bakron.run.evaluation import Evaluation
from bakron.run.pipeline import Job
from bakron.run.plan import Plan
from bakron.run.progress import Progress, Silent
from bakron.run.ranks import ALONE, Ranks
from bakron.run.rules import bits_text
from bakron.run.settings import Settings
from bakron.run.store import held, require_space


def compare(
    model: str | Path,
    variants: dict[str, Settings],
    evaluation: str | Path,
    work: str | Path,
    *,
    keep_work: bool = True,
    n_sequences: int | None = None,
    sequence_length: int | None = None,
    progress: Progress | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    ranks: Ranks = ALONE,
) -> list[dict[str, Any]]:
    """A row for the original and for each of ``variants`` (label → settings): perplexity, KL, p99, top-1, bits, seconds.

    All variants share calibration text and seed, so what is collected for one serves the others; finished pieces are
    kept in ``work`` and used again.  evaluation: held-out text.  keep_work: keep the pieces afterwards, too.
    on_plan: called with the plan before work starts.
    ranks: the processes that share the work, all of which make this call; the first one evaluates.
    Raises ConfigError when the variants differ in their data, and whatever is wrong with any of them, before work starts.
    """
    _require_same_data(variants)
    work, progress = Path(work), progress or Silent()
    jobs = _jobs(str(model), variants, work, progress, ranks)
    plainest = min(jobs.values(), key=lambda job: len(job.settings.transforms))
    held_out = ranks.from_first(
        lambda: Evaluation.of(plainest.decoder, evaluation, **_given(n_sequences, sequence_length))
    )
    ranks.from_first(lambda: _announce(list(jobs.values()), work, on_plan))
    with held(work, ranks, keep_work):
        of_original = held_out.reference(plainest.original(), progress) if ranks.first else None
        rows: list[dict[str, Any]] = []
        for label in variants:
            job = jobs.pop(label)  # so that its decoder goes when the next one comes
            if rows:
                job.reload()  # the variant before has changed the weights
            job.collect()
            job.solve()
            rows.append(ranks.from_first(functools.partial(_measured, label, job, held_out, of_original)))
    original = ranks.from_first(lambda: of_original and of_original[1])
    assert original is not None
    return [{"label": "original", **dataclasses.asdict(original)}, *rows]


def _announce(jobs: Sequence[Job], work: Path, on_plan: Callable[[Plan], None] | None) -> None:
    """Make the plan of all jobs, show it to ``on_plan``, and raise DiskSpaceError unless there is room for it."""
    transformed = {job.settings.transforms for job in jobs} - {()}
    plan = _together([job.plan() for job in jobs], 2 + len(transformed))
    if on_plan:
        on_plan(plan)
    require_space(work, plan.disk, "the work directory")


def _measured(
    label: str, job: Job, held_out: Evaluation, of_original: tuple[Reference, Quality] | None
) -> dict[str, Any]:
    """The row of a solved job."""
    assert of_original is not None
    return _row(label, job, held_out.of_model(job.decoder, of_original[0], job.progress))


def _jobs(
    model: str, variants: dict[str, Settings], work: Path, progress: Progress, ranks: Ranks
) -> dict[str, Job]:
    """A job for each variant; those with the same transforms share a decoder and what is collected from it."""
    jobs: dict[str, Job] = {}
    for label, settings in variants.items():
        same = next((job for job in jobs.values() if job.settings.transforms == settings.transforms), None)
        collected = work / "collected"
        if settings.transforms:
            collected = work / "transformed" / "+".join(settings.transforms)
        decoder = same.decoder if same else None
        jobs[label] = Job(model, settings, work / "runs" / label, progress, collected, ranks, loaded=decoder)
    if not jobs:
        raise ConfigError("compare: expected at least one method, seen none.")
    return jobs


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


def _together(plans: Sequence[Plan], n_models: int) -> Plan:
    """One plan for all variants, at most: so many models in memory, nothing shared on disk, nothing timed once."""
    largest = max(plans, key=lambda plan: plan.memory)
    seconds = [plan.seconds for plan in plans if plan.seconds is not None]
    return dataclasses.replace(
        largest,
        model_whole=n_models * largest.model_whole,
        model_one_block=n_models * largest.model_one_block,
        disk=sum(plan.disk for plan in plans),
        seconds=sum(seconds) if seconds else None,
    )


def _given(n_sequences: int | None, sequence_length: int | None) -> dict[str, int]:
    named = {"n_sequences": n_sequences, "sequence_length": sequence_length}
    return {name: value for name, value in named.items() if value is not None}
