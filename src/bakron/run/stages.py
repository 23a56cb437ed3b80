"""The stages of a run one by one: functions that meet only in a work directory, whose ``job.json`` says what it is for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bakron.errors import ConfigError
from bakron.run.collect import boundary, factors
from bakron.run.evaluation import Evaluation
from bakron.run.pipeline import REPORT, Job, announce, require_free_output
from bakron.run.plan import Plan
from bakron.run.progress import Progress, Silent
from bakron.run.ranks import ALONE, Ranks
from bakron.run.settings import Settings
from bakron.run.solve import solved
from bakron.run.store import held, write_text

JOB = "job.json"


def collect(
    model: str | Path,
    work: str | Path,
    *,
    recipe: str | Path | None = None,
    progress: Progress | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    ranks: Ranks = ALONE,
    **settings: Any,
) -> Job:
    """Make ``work``: the settings, and all statistics that solving with them needs; finished pieces are kept.

    settings: the fields of ``Settings``; they win over the recipe.  on_plan: called before work starts.
    ranks: the processes that share the work, all of which make this call.  Raises the named errors of ``bakron.errors``.
    """
    work = Path(work)
    job = Job(absolute(model), Settings.load(recipe, **settings), work, progress or Silent(), ranks=ranks)
    ranks.from_first(lambda: announce(job, on_plan))
    with held(work, ranks):
        if job.settings.needs_data:
            job.collected  # noqa: B018 - refuses work made from other data before job.json is replaced
        ranks.from_first(lambda: _write(job))
        job.collect()
    return job


def solve(
    work: str | Path,
    *,
    progress: Progress | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    ranks: Ranks = ALONE,
    **settings: Any,
) -> Job:
    """Solve what was collected in ``work``; the decoder of the job has the quantized weights then.

    settings: those that differ from what ``collect`` was called with.  ranks: as in ``collect``.  Raises ConfigError when they need statistics
    that were not collected, ResumeError when ``work`` holds layers solved with others.
    """
    job = _open(Path(work), progress, settings, ranks)
    _require_collected(job)
    ranks.from_first(lambda: on_plan and on_plan(job.plan()))
    with held(job.work, ranks):
        job.solved  # noqa: B018 - refuses layers solved otherwise before job.json is replaced
        ranks.from_first(lambda: _write(job))
        job.solve()
    return job


def export(
    work: str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    evaluation: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the checkpoint of what was solved in ``work`` to ``out``; returns its record.

    format: another one than ``collect`` was told.  evaluation: held-out text, measured into the model card.
    Raises ConfigError when blocks are not solved yet, OutputExistsError.
    """
    out = Path(out)
    require_free_output(out, overwrite)
    job = _open(Path(work), progress, {"format": format})
    missing = [b for b in range(job.decoder.n_blocks) if not job.solved.has(solved(b))]
    if missing:
        raise ConfigError(
            f"{work}: {len(missing)} of {job.decoder.n_blocks} blocks are not solved. Run: bakron solve {work}"
        )
    if not job.is_solved:
        raise ConfigError(f"{work}: the scales are not tuned yet. Run: bakron solve {work}")
    quality = None
    if evaluation:
        held_out = Evaluation.of(job.decoder, evaluation)
        reference, before = held_out.reference(job.original(), job.progress)
        job.apply()
        quality = held_out.facts(before, held_out.of_model(job.decoder, reference, job.progress))
    job.export(out, quality, overwrite)
    return json.loads((out / REPORT).read_text())


def _open(work: Path, progress: Progress | None, changes: dict[str, Any], ranks: Ranks = ALONE) -> Job:
    """The job that ``work`` was made for, with ``changes``. Raises ConfigError when there is none."""
    try:
        said = json.loads((work / JOB).read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{work}: has no {JOB}. Make it first: bakron collect MODEL {work}") from error
    changes = {key: value for key, value in changes.items() if value is not None}
    if "hessians" in changes:
        changes = {"estimator": None, **changes}  # what was collected is not used
    settings = said["settings"] | changes
    return Job(said["model"], Settings.load(**settings), work, progress or Silent(), ranks=ranks)


def _write(job: Job) -> None:
    job.work.mkdir(parents=True, exist_ok=True)
    settings = job.settings.as_dict()
    for name in ("calibration", "hessians"):
        if settings[name] is not None:
            settings[name] = absolute(settings[name])
    write_text(job.work / JOB, json.dumps({"model": job.model, "settings": settings}, indent=1) + "\n")


def absolute(name: str | Path) -> str:
    """An absolute path if ``name`` is one on this machine; else it is the name of something on a hub."""
    return str(Path(name).expanduser().resolve()) if Path(name).expanduser().exists() else str(name)


def _require_collected(job: Job) -> None:
    """Raise ConfigError unless everything that the solve will read is there."""
    if not job.settings.needs_data:
        return
    need = job.need
    wanted = [boundary(0)] if job.settings.sequential else []
    for b in range(job.decoder.n_blocks):
        wanted += [factors(need, b)] if need.factors else []
    wanted += [boundary(b) for b in range(job.decoder.n_blocks + 1)] if need.boundaries else []
    missing = [name for name in wanted if not job.collected.has(name)]
    if missing:
        raise ConfigError(
            f"{job.work}: method {job.settings.method} with estimator {job.settings.estimator_name} and inputs "
            f"{job.settings.inputs} needs {len(missing)} pieces that are not collected, {missing[0]} first. "
            f"Run bakron collect {job.model} {job.work} with these settings; what is there is kept."
        )
