"""The demonstration: SmolLM2-135M on Wikipedia, three methods compared, and the BaKron checkpoint written and verified."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from bakron.demo import prepare_smollm2, prepare_wikipedia
from bakron.run.compare import compare
from bakron.run.pipeline import Job
from bakron.run.plan import Plan
from bakron.run.progress import Progress, Silent, stage
from bakron.run.variants import make_variants
from bakron.run.verify import verify

BITS = 4
GROUP_SIZE = 64
N_SEQUENCES = 24
SEQUENCE_LENGTH = 256
N_HELD_OUT = 16


def work_directory(directory: Path) -> Path:
    """Where the demonstration keeps finished work until it is over."""
    return directory / "demo.work"


def demonstrate(
    directory: str | Path, *, progress: Progress | None = None, on_plan: Callable[[Plan], None] | None = None
) -> tuple[list[dict[str, Any]], Path]:
    """The rows of the comparison, and the checkpoint's directory; everything is made inside ``directory``.

    What an interrupted demonstration finished is used again.  Raises MissingExtraError without the demo's packages.
    """
    directory, progress = Path(directory), progress or Silent()
    # the readers of the packages' files draw bars of their own, which errors do not need
    with stage(progress, "prepare SmolLM2-135M and Wikipedia", 2), redirect_stderr(io.StringIO()):
        model = prepare_smollm2(directory / "smollm2")
        progress.advance()
        text = prepare_wikipedia(directory / "wikipedia")
        progress.advance()
    variants = make_variants(
        ["rtn", "gptq", "bakron"],
        [BITS],
        group_size=GROUP_SIZE,
        calibration=str(text / "calibration.jsonl"),
        n_sequences=N_SEQUENCES,
        sequence_length=SEQUENCE_LENGTH,
    )
    work = work_directory(directory)
    rows = compare(
        model,
        variants,
        text / "heldout.jsonl",
        work,
        n_sequences=N_HELD_OUT,
        sequence_length=SEQUENCE_LENGTH,
        progress=progress,
        on_plan=on_plan,
    )
    label = next(label for label in variants if label.startswith("bakron"))
    job = Job(str(model), variants[label], work / "runs" / label, progress, work / "collected")
    out = directory / f"smollm2-bakron-{BITS}bit"
    job.export(out, _quality(rows, label), overwrite=True)
    with stage(progress, "verify", 1):
        verify(out)
        progress.advance()
    shutil.rmtree(work)
    return rows, out


def _quality(rows: list[dict[str, Any]], label: str) -> dict[str, Any]:
    """What the model card says, from the comparison's rows."""
    by_label = {row["label"]: row for row in rows}
    row = by_label[label]
    return {
        "data": "heldout.jsonl",
        "perplexity_before": by_label["original"]["perplexity"],
        "perplexity_after": row["perplexity"],
        **{key: row[key] for key in ("kl", "kl_p99", "top1", "n_tokens")},
    }
