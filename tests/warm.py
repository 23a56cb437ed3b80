"""Imported by a fork server, so that what it forks has all code loaded: a small run, without gradients and threads."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from tiny_models import tiny_decoder

from bakron.run.pipeline import quantize

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder:
    model = tiny_decoder("llama", Path(folder) / "m", tokenizer=True)
    (Path(folder) / "text.txt").write_text("the quick brown fox " * 9)
    quantize(
        model,
        Path(folder) / "out",
        method="gptq",
        calibration=f"{folder}/text.txt",
        group_size=16,
        n_sequences=1,
        sequence_length=20,
    )
