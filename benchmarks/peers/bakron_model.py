"""bakron itself on a whole model, by the stages that ``bakron compare`` runs.

Options: ``settings``, those of a run, and ``work``, where finished pieces are kept; ``collected`` is shared by all rows.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from whole import Request, answer

from bakron.run.pipeline import Job
from bakron.run.settings import Settings


def quantize(request: Request) -> dict[str, Tensor]:
    """The linears as a loader of the checkpoint would see them."""
    settings = Settings(
        **request.options["settings"],
        bits=request.bits,
        group_size=request.group_size,
        symmetric=request.symmetric,
        seed=request.seed,
        device="cpu",
    )
    work, collected = (Path(request.options[name]) for name in ("work", "collected"))
    reused = work.exists() or (settings.needs_data and collected.exists())
    job = Job(request.model, settings, work, collected_in=collected)
    if settings.needs_data:
        assert request.ids is not None and torch.equal(torch.stack(job.sequences), request.ids)
    with request.measured():
        job.collect()
        job.solve()
    request.facts["bits_per_weight"] = job.export_plan.bits_per_weight
    request.facts["reused"] = reused  # then the seconds are not all that it took
    return {f"{spec.name}.weight": job.decoder.get_weight(spec.name) for spec in job.flat_targets}


if __name__ == "__main__":
    answer("bakron", quantize)
