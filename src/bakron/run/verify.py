"""Is a checkpoint on disk what was made? Asked of transformers, which knows nothing of how it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from bakron.errors import NonFiniteError, VerificationError
from bakron.models.reload import Reloaded
from bakron.run.pipeline import REPORT
from bakron.run.store import tensor_sha256

LISTED = 20


def verify(path: str | Path) -> dict[str, Any]:
    """Load ``path`` by transformers, compare every weight that bakron made with what it made, and run a short prompt.

    These are all quantized ones, and of transformed models embedding and head as well.  They are compared by the sha256
    of their dense values, which ``bakron.json`` holds.  Returns what was checked.
    Raises VerificationError, listing the layers that differ, or when there is no ``bakron.json``; ModelError when
    transformers cannot load or run the model; NonFiniteError when a logit is NaN or infinite.
    """
    path = Path(path)
    expected = _digests(path)
    reloaded = Reloaded(path)
    different = []
    for name, digest in expected.items():
        weight = reloaded.weight(name)
        if weight is None or tensor_sha256(weight) != digest:
            different.append(name + ("" if weight is not None else " (absent)"))
    if different:
        more = f"\n  and {len(different) - LISTED} more" if len(different) > LISTED else ""
        raise VerificationError(
            f"{path}: {len(different)} of {len(expected)} layers are not what was solved:\n"
            + "\n".join(f"  {name}" for name in different[:LISTED])
            + f"{more}\nThe files were changed or damaged after the export, or this version of transformers or "
            "compressed-tensors reads them otherwise. Export again, or install the versions that the README names."
        )
    if not bool(torch.isfinite(reloaded.logits).all()):
        raise NonFiniteError(
            f"{path}: the weights are right, but the logits hold NaN or infinity in {reloaded.logits.dtype}. "
            "If the original model does the same, its dtype is too narrow; else report it."
        )
    return {"model": str(path), "layers": len(expected), "equal": len(expected), "finite_logits": True}


def _digests(path: Path) -> dict[str, str]:
    """Module name → sha256 of its dense weight. Raises VerificationError."""
    file = path / REPORT
    if not file.is_file():
        raise VerificationError(
            f"{path}: there is no {REPORT}, which bakron writes into every checkpoint. Pass the directory of one."
        )
    try:
        digests = json.loads(file.read_text(encoding="utf-8"))["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise VerificationError(
            f"{file}: not a record of bakron ({type(error).__name__}: {error})."
        ) from error
    if not digests:
        raise VerificationError(f"{file}: lists no layer, so there is nothing to compare.")
    return digests
