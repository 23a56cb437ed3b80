"""Checkpoints that are quantized already: their dense weights, by way of the compressed-tensors package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bakron.errors import FormatError, MissingExtraError, ModelError
from bakron.models.checkpoint import INDEX_FILE, read_config, shard_files

METHOD = "compressed-tensors"
SHARD_BYTES = 2**30


def dense_tensors(directory: Path, quantization: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a compressed-tensors checkpoint by key, each quantized weight dense and in its scale's dtype.

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
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in shard_files(directory)]
        found: dict[str, Any] = {key: file for file in files for key in file.keys()}  # noqa: SIM118
        quantized = [key.removesuffix(".weight_scale") for key in found if key.endswith(".weight_scale")]
        for name in quantized:
            keys = [key for key in found if key.startswith(f"{name}.weight")]
            local = {key.removeprefix(f"{name}."): found.pop(key).get_tensor(key) for key in keys}
            yield f"{name}.weight", _decompress(name, local, quantization)
        for key, file in found.items():
            yield key, file.get_tensor(key)


def write_dense(directory: Path, quantization: dict[str, Any], out: Path) -> None:
    """Make a dense checkpoint of a compressed-tensors one in the directory ``out``, with one shard in memory."""
    config = read_config(directory)
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    places: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def publish() -> None:
        file = f"{len(places)}.safetensors"
        save_file(shard, out / file, {"format": "pt"})
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for key, tensor in dense_tensors(directory, quantization):
        shard[key] = tensor.contiguous()
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            publish()
    if shard:
        publish()
    (out / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))


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
