"""Reads the dense weights back out of a checkpoint that bakron wrote, without any model code, for checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from bakron.core.layers import Scheme
from bakron.errors import FormatError
from bakron.exporters.checkpoint import Checkpoint
from bakron.exporters.compressed_tensors import SUFFIXES, dequantize


def stored_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every (tensor name, dense values) of a dense or compressed-tensors checkpoint, one at a time, in file order.

    A packed layer comes as ``….weight``, dequantized to (d_out, d_in) in its scale's dtype. Raises FormatError for
    other formats and when a packed layer lacks a tensor.
    """
    checkpoint = Checkpoint(Path(directory))
    scheme = _scheme(checkpoint.config.get("quantization_config"), directory)
    names = (
        "weight_packed",
        "weight_scale",
        "weight_shape",
        *(() if scheme and scheme.symmetric else SUFFIXES[3:]),
    )
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in checkpoint.values():
        assert value is not None
        base, _, suffix = key.rpartition(".")
        if scheme is None or suffix not in SUFFIXES:
            yield key, value
            continue
        parts.setdefault(base, {})[suffix] = value
        if all(name in parts[base] for name in names):
            yield f"{base}.weight", dequantize(parts.pop(base), scheme)
    if parts:
        incomplete = {base: sorted(found) for base, found in parts.items()}
        raise FormatError(f"{directory}: packed layers are incomplete, expected {names}, seen {incomplete}")


def _scheme(block: dict[str, Any] | None, directory: Path) -> Scheme | None:
    if block is None:
        return None
    if block.get("format") != "pack-quantized" or list(block.get("config_groups", {})) != ["group_0"]:
        raise FormatError(
            f"{directory}: expected dense or pack-quantized weights of one scheme, seen {block}"
        )
    weights = block["config_groups"]["group_0"]["weights"]
    return Scheme(weights["num_bits"], weights.get("group_size") or -1, weights["symmetric"])
