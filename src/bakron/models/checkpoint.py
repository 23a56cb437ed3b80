"""The checkpoint directory a model comes from: where it is, which tensors its files hold, and whether they are finite."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bakron.errors import ModelError, NonFiniteError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def locate(path: str | Path) -> Path:
    """The local directory of a checkpoint: ``path`` itself, or the (downloaded) snapshot of a hub name.

    Raises ModelError when there is neither, or no config.json in it.
    """
    directory = Path(path)
    if directory.is_file():
        raise ModelError(f"{path}: expected the directory of a checkpoint, seen a file. Pass its directory.")
    if not directory.exists():
        directory = _snapshot(str(path))
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory}: there is no config.json, so this is not a Hugging Face checkpoint. Pass the "
            "directory that holds config.json and the .safetensors files."
        )
    return directory


def _snapshot(name: str) -> Path:
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise ModelError(f"{name}: no such directory. Check the path of the model.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:
        raise ModelError(
            f"{name}: no such directory, and the hub gave no model of that name ({type(error).__name__}: "
            f"{first_line(error)}). Check the path, the name, and the network."
        ) from error
    finally:
        enable_progress_bars()


def first_line(error: Exception) -> str:
    """The first line of an error's message, which may be empty."""
    return str(error).partition("\n")[0]


def listing(names: list[str], most: int = 8) -> str:
    """The names in one line, cut after ``most`` of them."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def require_finite(parameters: Mapping[str, Tensor]) -> None:
    """Raises NonFiniteError naming the parameters that hold NaN or infinity."""
    bad = [name for name, parameter in parameters.items() if not bool(torch.isfinite(parameter).all())]
    if bad:
        raise NonFiniteError(
            f"{listing(bad)}: the weights hold NaN or infinity. The checkpoint is damaged, "
            "or its values overflow the compute dtype; load it in float32 or fetch it again."
        )


def read_config(directory: Path) -> dict[str, Any]:
    """config.json as a dict. Raises ModelError when it is not a JSON object."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(
            f"{directory / 'config.json'}: not valid JSON ({error}). Fetch the file again."
        ) from error
    if not isinstance(config, dict):
        raise ModelError(
            f"{directory / 'config.json'}: expected a JSON object, seen {type(config).__name__}."
        )
    return config


def shard_files(directory: Path) -> list[Path]:
    """The safetensors files of the checkpoint, as its index lists them. ModelError when one is missing."""
    index = directory / INDEX_FILE
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = [SINGLE_FILE]
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelError(
            f"{directory}: {', '.join(missing)} not found. bakron reads safetensors checkpoints only; fetch "
            "the missing files, or convert an older checkpoint with model.save_pretrained(DIR)."
        )
    return [directory / name for name in names]


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the checkpoint by its key, read from the headers alone. Raises ModelError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in shard_files(directory):
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ModelError(f"{file}: not a readable safetensors file ({error}). Fetch it again.") from error
    return shapes


def resolve_key(name: str, root: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The checkpoint key of a parameter; its prefix may differ (``transformer.h.0`` stored as ``h.0``).

    name: of the parameter in the model.  root: path of the list of blocks, whose last component is never dropped.
    shape: of the parameter.  shapes: of the checkpoint's tensors.
    Raises ModelError naming the parameter when no key, several keys, or a tensor of another shape is found.
    """
    parts = name.split(".")
    for start in range(len(root.split("."))):
        key = ".".join(parts[start:])
        found = [key] if key in shapes else [other for other in shapes if other.endswith(f".{key}")]
        if len(found) > 1:
            raise ModelError(f"{name}: several tensors of the checkpoint could be it: {', '.join(found)}.")
        if found and shapes[found[0]] != shape:
            raise ModelError(
                f"{name}: is {shape} in the model, but {shapes[found[0]]} in the checkpoint, "
                f"where it is called {found[0]}."
            )
        if found:
            return found[0]
    raise ModelError(
        f"{name}: the checkpoint has no tensor of this name, under any prefix. The model is built from "
        "tensors stored in another layout (for example fused ones), which bakron cannot write back."
    )
