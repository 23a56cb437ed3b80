"""What an export will write, known before it starts: sizes, bits per weight, dtype of the scales, files to copy."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bakron.core.layers import Scheme
from bakron.errors import DiskSpaceError, FormatError
from bakron.exporters import Exporter
from bakron.exporters.checkpoint import CONFIG_NAME, Checkpoint

CARD_NAME = "README.md"
WEIGHT_SUFFIXES = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf"),
    *(".h5", ".msgpack", ".npz", ".ot", ".onnx", ".onnx_data"),
}
REPLACED_NAMES = {CONFIG_NAME, CARD_NAME, "quantize_config.json", "quant_config.json", "hf_quant_config.json"}
DISK_MARGIN = 1 << 20


@dataclass(frozen=True)
class Changes:
    """What differs from the source besides the quantized layers.

    tensors: by name, on the CPU, in the shape and dtype of the source's; names that the source lacks are added.
    config: entries of config.json.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def added(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """The tensors that ``checkpoint`` lacks."""
        return {key: value for key, value in self.tensors.items() if key not in checkpoint.infos}


@dataclass(frozen=True)
class ExportPlan:
    """What an export will write.

    total_bytes: all tensors and auxiliary files.  quantized_bytes: the tensors of the quantized layers, scales
    included.  quantized_weights, all_weights: numbers of elements.  scale_dtype: the dtype that every scale must have.
    n_tensors: tensors of the source, and those added to it.
    """

    total_bytes: int
    quantized_bytes: int
    quantized_weights: int
    all_weights: int
    scale_dtype: torch.dtype
    n_tensors: int

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk per quantized weight, scales and zeros included."""
        return 8 * self.quantized_bytes / max(1, self.quantized_weights)


def plan_export(
    source: Path, exporter: Exporter, schemes: Mapping[str, Scheme], changes: Changes | None = None
) -> ExportPlan:
    """Sizes and the scale dtype of an export, from file headers only.

    schemes: the source's names of the weights to quantize, and how; their sizes must have passed exporter.check.
    Raises FormatError when the source is not a plain safetensors checkpoint with these two-dimensional tensors, or the
    changes do not fit it.
    """
    checkpoint, changes = Checkpoint(Path(source)), changes or Changes()
    _check_source(checkpoint, list(schemes), changes)
    dtype = checkpoint.model_dtype(schemes or checkpoint.infos)
    infos = {key: checkpoint.infos[key] for key in schemes}
    quantized = sum(
        exporter.stored_bytes(info.shape[0], info.shape[1], schemes[key], dtype)
        for key, info in infos.items()
    )
    copied = sum(info.n_bytes for key, info in checkpoint.infos.items() if key not in infos)
    added = changes.added(checkpoint).values()
    files = sum((checkpoint.path / name).stat().st_size for name in auxiliary_files(checkpoint.path))
    return ExportPlan(
        total_bytes=quantized + copied + sum(tensor.nbytes for tensor in added) + files,
        quantized_bytes=quantized,
        quantized_weights=sum(info.numel for info in infos.values()),
        all_weights=sum(info.numel for info in checkpoint.infos.values()) + sum(map(Tensor.numel, added)),
        scale_dtype=dtype,
        n_tensors=len(checkpoint.infos) + len(added),
    )


def check_disk(directory: Path, plan: ExportPlan) -> None:
    """Raise DiskSpaceError when the disk of this directory has less room than the plan needs."""
    free = shutil.disk_usage(directory).free
    need = plan.total_bytes + DISK_MARGIN
    if free < need:
        raise DiskSpaceError(
            f"{directory}: the export takes {need / 1e9:.3f} GB, but only {free / 1e9:.3f} GB are free; "
            "make room or choose an output on another disk"
        )


def auxiliary_files(source: Path) -> list[Path]:
    """Relative paths of what is copied as it is: tokenizer, chat template, generation and processor files, code.

    Left out: weights and their indices, quantization files of other tools, config.json and README.md (rewritten),
    hidden files and directories.
    """
    paths = (path.relative_to(source) for path in sorted(Path(source).rglob("*")) if path.is_file())
    return [path for path in paths if not _is_left_out(path)]


def _is_left_out(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith((".index.json", ".bin.json"))
    return hidden or weights or (len(path.parts) == 1 and path.name in REPLACED_NAMES)


def _check_source(checkpoint: Checkpoint, keys: Sequence[str], changes: Changes) -> None:
    """Refuse a source that is quantized already, lacks one of the tensors to quantize, or has others than the changed."""
    if checkpoint.config.get("quantization_config"):
        method = checkpoint.config["quantization_config"].get("quant_method", "unknown")
        raise FormatError(
            f"{checkpoint.path} is quantized already ({method}); start from the original checkpoint"
        )
    if not keys and not changes.tensors:
        raise FormatError(f"{checkpoint.path}: no layer to export; expected at least one quantized layer")
    missing = [key for key in keys if key not in checkpoint.infos]
    if missing:
        raise FormatError(f"{checkpoint.path} has no tensors of these names: {', '.join(missing)}")
    shapes = {key: checkpoint.infos[key].shape for key in keys if len(checkpoint.infos[key].shape) != 2}
    if shapes:
        raise FormatError(
            f"{checkpoint.path}: expected two-dimensional weights, seen {shapes}; skip these layers"
        )
    for key, tensor in changes.tensors.items():
        info = checkpoint.infos.get(key)
        if key in keys or (info and (info.shape, info.dtype) != (tuple(tensor.shape), tensor.dtype)):
            why = "which is to be quantized" if key in keys else f"expected {info}"
            raise FormatError(
                f"{checkpoint.path}: cannot put {tuple(tensor.shape)} {tensor.dtype} in place of {key}, {why}"
            )
