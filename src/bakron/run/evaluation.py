"""Held-out text for a run: which windows are read, and the quality of a model on them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bakron.data import load_sequences
from bakron.evals.quality import Quality, Reference, evaluate
from bakron.models import Decoder
from bakron.run.collect import REPLAY_CHECKED
from bakron.run.progress import Progress, stage

SEQUENCE_LENGTH = 512
N_SEQUENCES = 24


@dataclass(frozen=True)
class Evaluation:
    """The first windows of a held-out text, the same for every model compared. Raises DataError when it is too short."""

    source: str
    sequences: list[Tensor]

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        text: str | Path,
        n_sequences: int = N_SEQUENCES,
        sequence_length: int = SEQUENCE_LENGTH,
    ) -> Evaluation:
        """``n_sequences`` windows of ``text``, tokenised for ``decoder``, which is found to be what its blocks make of it."""
        sequences = load_sequences(
            str(text),
            None if str(text).endswith(".safetensors") else decoder.tokenizer,
            n_sequences=n_sequences,
            sequence_length=min(sequence_length, decoder.max_length),
            seed=None,
            vocab_size=decoder.vocab_size,
        )
        decoder.check_replay(sequences[0][:REPLAY_CHECKED])
        return cls(Path(text).name, sequences)

    def reference(self, decoder: Decoder, progress: Progress) -> tuple[Reference, Quality]:
        """The original model's states, to be taken before its weights change, and its own quality."""
        n = len(self.sequences)
        with stage(progress, "evaluate the original model", n * (2 * decoder.n_blocks + 1)):
            reference = Reference(decoder, self.sequences, progress=progress.advance)
            return reference, evaluate(decoder, self.sequences, progress=progress.advance)

    def of_model(self, decoder: Decoder, reference: Reference, progress: Progress) -> Quality:
        """The quality of ``decoder`` against the original."""
        with stage(progress, "evaluate the quantized model", len(self.sequences) * (decoder.n_blocks + 1)):
            return evaluate(decoder, self.sequences, reference, progress=progress.advance)

    def facts(self, before: Quality, after: Quality) -> dict[str, Any]:
        """What a model card and a table say."""
        values = dataclasses.asdict(after)
        values["perplexity_after"] = values.pop("perplexity")
        return {"data": self.source, "perplexity_before": before.perplexity, **values}
