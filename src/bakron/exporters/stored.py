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
    schemes = _schemes(checkpoint.config.get("quantization_config"), directory)
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in checkpoint.values():
        assert value is not None
        base, _, suffix = key.rpartition(".")
        if not schemes or suffix not in SUFFIXES:
            yield key, value
            continue
        parts.setdefault(base, {})[suffix] = value
        scheme = schemes.get(base, schemes.get("Linear"))
        if scheme is None:
            raise FormatError(f"{directory}: no config group targets the packed layer {base}")
        if all(name in parts[base] for name in _names(scheme)):
            yield f"{base}.weight", dequantize(parts.pop(base), scheme)
    if parts:
        incomplete = {base: sorted(found) for base, found in parts.items()}
        raise FormatError(
            f"{directory}: packed layers are incomplete, expected {SUFFIXES}, seen {incomplete}"
        )


def _names(scheme: Scheme) -> tuple[str, ...]:
    """The tensors that a packed layer of ``scheme`` has."""
    return SUFFIXES[:3] if scheme.symmetric else SUFFIXES


def _schemes(block: dict[str, Any] | None, directory: Path) -> dict[str, Scheme]:
    """Target (a module's name, or ``Linear``) → scheme; nothing for a dense checkpoint."""
    if block is None:
        return {}
    if block.get("format") != "pack-quantized":
        raise FormatError(f"{directory}: expected dense or pack-quantized weights, seen {block}")
    schemes = {}
    for group in block["config_groups"].values():
        weights = group["weights"]
        scheme = Scheme(weights["num_bits"], weights.get("group_size") or -1, weights["symmetric"])
        schemes |= dict.fromkeys(group["targets"], scheme)
    return schemes
