"""Models with transformed weights: loaded as their checkpoint will hold them, what of them it gets, and dense copies."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bakron.errors import ConfigError
from bakron.exporters import get_exporter
from bakron.exporters.checkpoint import Checkpoint
from bakron.exporters.plan import Changes
from bakron.exporters.writer import check_output, write_checkpoint
from bakron.models import Decoder, load_decoder, transform
from bakron.run.store import tensor_sha256

CARD = """---
base_model: "{base_model}"
library_name: transformers
tags:
- bakron
---

# {base_model}, {transform}

Weights transformed ({transform}) with bakron {version}. It computes what {base_model} does, but for the rounding of the
new weights to their dtype; nothing is quantized.

## How to load it

```python
{usage}
```
"""


def load_transformed(
    model: str | Path, names: Sequence[str], *, dtype: torch.dtype, device: str | torch.device
) -> Decoder:
    """The decoder after the transforms ``names``, made in float32 and then cast to ``dtype``.

    Changed parameters that are not quantizable weights (embedding, head, norms, biases) have the values that fit the
    checkpoint's dtype, so that what is calibrated is what will be stored.  Raises ModelError, NonFiniteError.
    """
    decoder = transform(load_decoder(model, dtype=torch.float32, device=device), names)
    put_back(decoder, changes_of(decoder, {spec.tensor_key for specs in decoder.linears for spec in specs}))
    decoder.cast(dtype)
    return decoder


def changes_of(decoder: Decoder, quantized: Collection[str]) -> Changes:
    """What the checkpoint gets of the transformed ``decoder``, in its own dtypes, but for the ``quantized`` tensors."""
    if not decoder.changed:
        return Changes()
    assert decoder.path is not None
    infos = Checkpoint(decoder.path).infos
    embedding = infos[decoder.key_of(f"{decoder.embedding_name}.weight")]  # which a tied head was
    tensors = {
        key: decoder.model.get_parameter(name).detach().to("cpu", infos.get(key, embedding).dtype)
        for name, key in decoder.changed.items()
        if key not in quantized
    }
    untied = f"{decoder.head_name}.weight" in decoder.changed
    return Changes(tensors, {"tie_word_embeddings": False} if untied else {})


def put_back(decoder: Decoder, changes: Changes) -> None:
    """Give the decoder the values that the checkpoint gets."""
    with torch.no_grad():
        for name, key in decoder.changed.items():
            if key in changes.tensors:
                decoder.model.get_parameter(name).copy_(changes.tensors[key])


def digests(decoder: Decoder, changes: Changes) -> dict[str, str]:
    """Module → sha256 of its matrix in the checkpoint, for what ``changes`` has of linears and embeddings."""
    modules = {name: decoder.model.get_submodule(name.rpartition(".")[0]) for name in decoder.changed}
    return {
        name.removesuffix(".weight"): tensor_sha256(changes.tensors[key])
        for name, key in decoder.changed.items()
        if key in changes.tensors
        and name.endswith(".weight")
        and isinstance(modules[name], nn.Linear | nn.Embedding)
    }


def write_transformed(
    model: str | Path, out: str | Path, names: Sequence[str], *, overwrite: bool = False
) -> dict[str, Any]:
    """Write the model after the transforms ``names``, nothing quantized, to ``out``; returns what its bakron.json says.

    Raises ConfigError (no transform), ModelError, FormatError, OutputExistsError, DiskSpaceError.
    """
    if not names:
        raise ConfigError("transform: expected at least one of fold, rotate, heads, rescale, seen none.")
    decoder = load_decoder(model)
    assert decoder.path is not None
    check_output(decoder.path, Path(out), overwrite)
    transform(decoder, names)
    changes, exporter = changes_of(decoder, ()), get_exporter("dense")
    facts = {"base_model": decoder.path.name, "transform": "+".join(names), "version": version("bakron")}
    record = {**facts, "sha256": digests(decoder, changes)}
    write_checkpoint(
        decoder.path,
        Path(out),
        exporter,
        {},
        {},
        ignore=[],
        card=CARD.format(**facts, usage=exporter.usage([])),
        extra={"bakron.json": json.dumps(record, indent=1) + "\n"},
        changes=changes,
        overwrite=overwrite,
    )
    return record
