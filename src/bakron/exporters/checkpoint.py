"""Reading a safetensors checkpoint directory: which tensor lies in which file, its shape, its dtype, its bytes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from bakron.errors import FormatError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
CONVERT = (
    "load the model with transformers and save it again, which writes safetensors: "
    "AutoModelForCausalLM.from_pretrained(SOURCE, dtype='auto').save_pretrained(NEW), and copy its tokenizer files"
)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, from the header of its file."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements."""
        return int(torch.Size(self.shape).numel())

    @property
    def n_bytes(self) -> int:
        """The bytes of the values."""
        return self.numel * self.dtype.itemsize


class Checkpoint:
    """A directory with config.json and safetensors weights, in one file or in shards.

    Raises FormatError when the directory has no config.json, no safetensors weights, or an index that lies.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        if not (self.path / CONFIG_NAME).is_file():
            raise FormatError(f"{self.path}: no {CONFIG_NAME} here; expected the directory of a model")
        self.infos = {key: info for file in self._files() for key, info in _header(self.path, file).items()}
        self._check_index()

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json as it is."""
        return json.loads((self.path / CONFIG_NAME).read_text(encoding="utf-8"))

    def values(self, skip: Collection[str] = ()) -> Iterator[tuple[str, Tensor | None]]:
        """Every (name, values on the CPU) in a fixed order, one at a time; names in skip come with None, unread."""
        for name in dict.fromkeys(info.file for info in self.infos.values()):
            with safe_open(self.path / name, framework="pt") as file:
                for key in (key for key, info in self.infos.items() if info.file == name):
                    yield key, None if key in skip else file.get_tensor(key)

    def model_dtype(self, keys: Collection[str]) -> torch.dtype:
        """The dtype a loader gives these tensors: config.json's, or else their own; scales must have it.

        Raises FormatError when config.json says nothing and the tensors disagree, or when it is no float dtype.
        """
        text = self.config.get("text_config") or {}
        said = [part.get(field) for part in (self.config, text) for field in ("dtype", "torch_dtype")]
        named = next((name for name in said if isinstance(name, str)), None)
        dtypes = {getattr(torch, named, None)} if named else {self.infos[key].dtype for key in keys}
        if len(dtypes) != 1 or not dtypes <= FLOATS:
            seen = f"dtype {named!r} in {CONFIG_NAME}" if named else f"tensors of {sorted(map(str, dtypes))}"
            expected = "expected one of float16, bfloat16, float32, float64 for all quantized weights"
            raise FormatError(f"{self.path}: {expected}, seen {seen}; set 'dtype' in {CONFIG_NAME}")
        return next(iter(dtypes))  # type: ignore[return-value]

    def _files(self) -> list[str]:
        """The weight files, in the order in which transformers would choose them."""
        if (self.path / SINGLE_NAME).is_file():
            return [SINGLE_NAME]
        if (self.path / INDEX_NAME).is_file():
            files = sorted(set(self._weight_map().values()))
            missing = [file for file in files if not (self.path / file).is_file()]
            if missing:
                raise FormatError(
                    f"{self.path}: {INDEX_NAME} names files that are missing: {', '.join(missing)}"
                )
            return files
        others = sorted(file.name for file in self.path.glob("*.bin")) or sorted(
            file.name for file in self.path.glob("*.safetensors")
        )
        raise FormatError(
            f"{self.path}: expected {SINGLE_NAME} or {INDEX_NAME}, seen {', '.join(others) or 'no weights'}; {CONVERT}"
        )

    def _weight_map(self) -> dict[str, str]:
        return json.loads((self.path / INDEX_NAME).read_text(encoding="utf-8"))["weight_map"]

    def _check_index(self) -> None:
        if (self.path / SINGLE_NAME).is_file():
            return
        wrong = sorted(
            key
            for key, file in self._weight_map().items()
            if key not in self.infos or self.infos[key].file != file
        )
        if wrong:
            raise FormatError(
                f"{self.path}: {INDEX_NAME} names tensors that are not in their files: {wrong[:5]}"
            )


def _header(directory: Path, name: str) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of one safetensors file, sorted by name."""
    with safe_open(directory / name, framework="pt") as opened:
        slices = {key: opened.get_slice(key) for key in sorted(opened.keys())}
        unknown = {key: s.get_dtype() for key, s in slices.items() if s.get_dtype() not in DTYPES}
        if unknown:
            raise FormatError(
                f"{directory / name}: tensors of unknown dtype, likely already quantized: {unknown}"
            )
        return {
            key: TensorInfo(name, tuple(s.get_shape()), DTYPES[s.get_dtype()]) for key, s in slices.items()
        }
