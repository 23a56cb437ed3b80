"""Checkpoints that are quantized already: their dense weights, by way of the compressed-tensors package."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bakron.errors import FormatError, MissingExtraError, ModelError
from bakron.models.checkpoint import shard_files

METHOD = "compressed-tensors"


def dense_state_dict(directory: Path, quantization: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors of a compressed-tensors checkpoint, each quantized weight dense and in its scale's dtype.

    quantization: config.json's ``quantization_config``.  Each layer is decompressed with the scheme of its
    own config group (transformers' own ``dequantize=True`` takes the first group for all of them).
    Raises ModelError for another quantization method, FormatError for a layer that no group covers.
    """
    if quantization.get("quant_method") != METHOD:
        raise ModelError(
            f"{directory}: already quantized by {quantization.get('quant_method')!r}, which bakron does "
            f"not read. Expected a dense checkpoint, or one in the {METHOD} format. "
            "Start from the original model."
        )
    state = {key: tensor for file in shard_files(directory) for key, tensor in load_file(file).items()}
    for name in [key.removesuffix(".weight_scale") for key in state if key.endswith(".weight_scale")]:
        local = {key: state.pop(f"{name}.{key}") for key in _local_keys(name, state)}
        state[f"{name}.weight"] = _decompress(name, local, quantization)
    return state


def _local_keys(name: str, state: Iterable[str]) -> list[str]:
    return [key.removeprefix(f"{name}.") for key in state if key.startswith(f"{name}.weight")]


def _decompress(name: str, local: dict[str, Tensor], quantization: dict[str, Any]) -> Tensor:
    try:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationScheme
        from compressed_tensors.utils.match import match_targets
    except ImportError as error:
        raise MissingExtraError(
            f"{name}: reading a quantized checkpoint needs compressed-tensors: pip install compressed-tensors"
        ) from error

    linear = nn.Linear(1, 1, device="meta")
    by_target = {
        target: group for group in quantization["config_groups"].values() for target in group["targets"]
    }
    matched = match_targets(name, linear, list(by_target))
    if not matched:
        raise FormatError(
            f"{name}: has a weight_scale, but no config group targets it: {', '.join(by_target)}."
        )
    scheme = QuantizationScheme.model_validate(by_target[matched[0]])
    compressor = BaseCompressor.get_value_from_registry(scheme.format or quantization["format"])
    with torch.no_grad():
        weight = compressor.decompress({**local}, scheme)["weight"]
    assert weight is not None
    return weight
