"""The quality of a checkpoint directory, by itself or against its original."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from bakron.evals.quality import evaluate
from bakron.run.evaluation import N_SEQUENCES, SEQUENCE_LENGTH, Evaluation
from bakron.run.pipeline import load
from bakron.run.progress import Progress, Silent, stage
from bakron.run.settings import Settings


def measure(
    checkpoint: str | Path,
    text: str | Path,
    *,
    reference: str | Path | None = None,
    n_sequences: int = N_SEQUENCES,
    sequence_length: int = SEQUENCE_LENGTH,
    progress: Progress | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Perplexity of ``checkpoint`` on the first windows of ``text``, and with a ``reference`` KL, p99 and top-1 to it.

    settings: ``device``, ``dtype`` and ``offload`` of ``Settings``.  Raises ModelError, DataError, ShapeError, NonFiniteError.
    """
    progress = progress or Silent()
    chosen = Settings.load(**settings)
    facts = {
        "model": str(checkpoint),
        "reference": None if reference is None else str(reference),
        "text": str(text),
    }
    original = None if reference is None else load(reference, chosen)
    decoder = load(checkpoint, chosen)
    held_out = Evaluation.of(original or decoder, text, n_sequences, sequence_length)
    if original is None:
        with stage(progress, "evaluate the model", len(held_out.sequences) * (decoder.n_blocks + 1)):
            quality = evaluate(decoder, held_out.sequences, progress=progress.advance)
        return {**facts, **dataclasses.asdict(quality)}
    states, before = held_out.reference(original, progress)
    quality = held_out.of_model(decoder, states, progress)
    return {**facts, **dataclasses.asdict(quality), "perplexity_reference": before.perplexity}
