"""Directories of Hessian factors in the layout of docs/hessians.md, read one matrix at a time and checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bakron.core.layers import LinearSpec
from bakron.core.linalg import check_hessian
from bakron.core.noise import relative_error
from bakron.core.packed import packed_size, unpack
from bakron.errors import ConfigError, NonFiniteError, ShapeError
from bakron.run.progress import Progress, stage
from bakron.run.store import Store, files_sha256

LAYOUT = 1
SIDES = ("H_in", "H_out")
COUNTS = ("n_sequences", "n_tokens")
NOT_FACTORS = "token_weights"


class Factors:
    """The factors in a directory, by linear and side ("H_in", "H_out").

    path: where the files are.  files: all of them.  linears: all names, in the files' order.
    """

    def __init__(self, path: str | Path) -> None:
        """Read all headers of ``path``: a directory of factor files, or a work directory with one collection in it.

        Raises ConfigError (no factors, unknown keys, contradictions), ShapeError.
        """
        self.path = _locate(Path(path).expanduser())
        self.files = sorted(self.path.glob("*.safetensors"))
        self.metadata: dict[Path, dict[str, Any]] = {}
        self._size: dict[tuple[str, str], int] = {}
        self._file: dict[tuple[str, str], Path] = {}
        self._shared: dict[str, str] = {}
        for file in self.files:
            self._read_header(file)
        if not self._file:
            raise ConfigError(f"{self.path}: its files hold no factor (docs/hessians.md).")
        names = {name: None for name, _ in self._file} | dict.fromkeys(self._shared)
        self.linears = list(names)
        for name, other in self._shared.items():
            if (other, "H_in") not in self._file:
                raise ConfigError(
                    f"{self.path}: shared_H_in says that {name} has the H_in of {other}, which is not there."
                )

    def has(self, name: str, side: str) -> bool:
        """Whether there is this factor."""
        return self._owner(name, side) in self._file

    def size(self, name: str, side: str) -> int | None:
        """n of this (n, n) factor, None when it is not there."""
        return self._size.get(self._owner(name, side))

    def keys(self, file: Path) -> list[tuple[str, str]]:
        """(linear, side) of every factor in ``file``."""
        return [key for key, where in self._file.items() if where == file]

    def shares(self, name: str) -> str:
        """The linear whose H_in is that of ``name``: itself, or another with the same input."""
        return self._owner(name, "H_in")[0]

    def holds(self, side: str) -> bool:
        """Whether any linear has a factor of this side."""
        return any(other == side for _, other in self._file)

    def load(self, name: str, side: str) -> Tensor | None:
        """The symmetric (n, n) factor in float32 or float64, None when it is not there.

        Raises ConfigError (damaged file), NonFiniteError, ShapeError (a whole matrix that is not symmetric).
        """
        key = self._owner(name, side)
        if key not in self._file:
            return None
        tensor = self._tensor(key)
        what = f"{self._file[key]}: {'.'.join(key)}"
        if tensor.ndim == 2:
            return check_hessian(tensor, len(tensor), what)
        if not _finite(tensor):
            raise NonFiniteError(f"{what}: holds NaN or infinite values. Make it anew, in float32.")
        return unpack(tensor)

    def counts(self, name: str) -> dict[str, int]:
        """n_sequences and n_tokens behind the factors of ``name``, the fewest of its files; 0 where none says it."""
        files = {self._file[key] for side in SIDES if (key := self._owner(name, side)) in self._file}
        return {key: min(self.metadata[file].get(key, 0) for file in files) for key in COUNTS}

    def fact(self, key: str) -> Any:
        """What the files say about ``key`` ("model", "estimator", "labels"), None when they say nothing.

        Raises ConfigError when they do not agree.
        """
        said = {file: metadata.get(key) for file, metadata in self.metadata.items()}
        first, *others = said.values()
        if any(other != first for other in others):
            different = next(file for file, value in said.items() if value != first)
            raise ConfigError(
                f"{self.path}: {key} is {first!r} in {self.files[0].name} and {said[different]!r} in {different.name}. "
                "Keep factors of different origin in different directories."
            )
        return first

    @cached_property
    def sha256(self) -> str:
        """Of all files."""
        return files_sha256(self.files)

    def of(self, specs: Sequence[LinearSpec]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All factors of ``specs`` by ``<linear>.<side>``, a shared one loaded once; and facts: the least counts behind them,
        and ``error_out``, the relative errors of H_out by linear, None where unknown.
        """
        loaded: dict[tuple[str, str], Tensor | None] = {}
        tensors: dict[str, Tensor] = {}
        for spec in specs:
            for side in SIDES:
                key = self._owner(spec.name, side)
                if key not in loaded:
                    loaded[key] = self.load(*key)
                H = loaded[key]
                if H is not None:
                    tensors[f"{spec.name}.{side}"] = H
        counts = [self.counts(spec.name) for spec in specs]
        errors = {spec.name: self.error_out(spec.name, tensors.get(f"{spec.name}.H_out")) for spec in specs}
        least = {key: min((of[key] for of in counts), default=0) for key in COUNTS}
        return tensors, {**least, "error_out": errors}

    def error_out(self, name: str, H_out: Tensor | None) -> float | None:
        """The relative error of the H_out of ``name``, None where its file does not say enough."""
        return None if H_out is None else _error(name, H_out, self.metadata[self._file[name, "H_out"]])

    def require(self, specs: Sequence[LinearSpec], model: str) -> None:
        """Raise unless ``specs`` of the model with the fingerprint ``model`` can be solved with these factors.

        Each needs an H_in, and an H_out may be missing.  Raises ConfigError, ShapeError, naming the linear.
        """
        made_of = self.fact("model")
        if made_of not in (None, model):
            raise ConfigError(
                f"{self.path}: the factors are of the model with fingerprint {made_of}, and this one's is {model}. "
                "Give the directory that was made of this model."
            )
        missing = [spec.name for spec in specs if not self.has(spec.name, "H_in")]
        if missing and not self.holds("H_in"):
            raise ConfigError(
                f"{self.path}: {missing[0]} and all others have no H_in there, only an H_out: a sequential "
                "collection takes H_in from the quantized prefix. Collect with inputs static."
            )
        if missing:
            raise ConfigError(
                f"{self.path}: {len(missing)} of {len(specs)} linears have no H_in there, {missing[0]} first; names "
                f"there are like {self.linears[0]}. Add them, or leave these linears out with skip."
            )
        for spec in specs:
            for side, wanted in (("H_in", spec.d_in), ("H_out", spec.d_out)):
                if self.size(spec.name, side) not in (None, wanted):
                    n = self.size(spec.name, side)
                    raise ShapeError(
                        f"{self.path}: {spec.name}: expected {side} ({wanted}, {wanted}) for a weight "
                        f"({spec.d_out}, {spec.d_in}), seen ({n}, {n}). H_in belongs to the inputs of y = W x, H_out "
                        "to its outputs: check that they are not exchanged, and that the model is the same."
                    )

    def tells_error(self, name: str) -> bool:
        """Whether the metadata beside H_out says what its relative error is found from."""
        metadata = self.metadata[self._file[name, "H_out"]]
        return "n_sequences" in metadata and name in metadata.get("squares_out", {})

    def check_values(self, progress: Progress) -> None:
        """Read all factors. Raises ConfigError, NonFiniteError, ShapeError."""
        with stage(progress, "check the given Hessian factors", len(self._file)):
            for key in self._file:
                self.load(*key)
                progress.advance()

    def _owner(self, name: str, side: str) -> tuple[str, str]:
        if side == "H_in" and (name, side) not in self._file:
            return self._shared.get(name, name), side
        return name, side

    def _tensor(self, key: tuple[str, str]) -> Tensor:
        with _opened(self._file[key]) as file:
            return file.get_tensor(".".join(key))

    def _read_header(self, file: Path) -> None:
        with _opened(file) as opened:
            metadata = {key: _value(text) for key, text in (opened.metadata() or {}).items()}
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            headers = {key: (tuple(part.get_shape()), part.get_dtype()) for key, part in slices.items()}
        _check_metadata(file, metadata)
        self.metadata[file] = metadata
        self._shared |= metadata.get("shared_H_in", {})
        for key, (shape, dtype) in headers.items():
            name, _, side = key.rpartition(".")
            if side == NOT_FACTORS:
                continue
            if side not in SIDES or not name:
                raise ConfigError(
                    f"{file}: {key!r}: expected keys <linear>.H_in and <linear>.H_out. Is this a directory of "
                    "Hessian factors (docs/hessians.md)?"
                )
            if (name, side) in self._file:
                raise ConfigError(f"{file}: {key} is in {self._file[name, side].name} too. Remove one.")
            if dtype not in ("F32", "F64"):
                raise ConfigError(f"{file}: {key}: expected float32 or float64 numbers, seen {dtype}.")
            self._size[name, side] = _size(f"{file}: {key}", shape)
            self._file[name, side] = file


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` of a factor file, all factors as whole matrices."""
    return {
        key: unpack(value) if key.endswith((".H_in", ".H_out")) and value.ndim == 1 else value
        for key, value in tensors.items()
    }


def of_piece(store: Store, piece: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What ``Factors.of`` gives, of all linears in a piece of a collection, and the token weights beside them."""
    tensors, metadata = unpacked(store.load(piece)), store.metadata(piece)
    names = [key.removesuffix(".H_out") for key in tensors if key.endswith(".H_out")]
    errors = {name: _error(name, tensors[f"{name}.H_out"], metadata) for name in names}
    return tensors, {**{key: metadata[key] for key in COUNTS}, "error_out": errors}


def _error(name: str, H_out: Tensor, metadata: Mapping[str, Any]) -> float | None:
    """The relative error of the H_out of ``name`` in a file with this ``metadata``, None where it does not say enough."""
    n, squares = metadata.get("n_sequences"), metadata.get("squares_out", {}).get(name)
    return None if n is None or squares is None else relative_error(H_out, squares, n)


def _locate(path: Path) -> Path:
    """The directory in which the factor files are. Raises ConfigError."""
    if any(path.glob("*.safetensors")):
        return path
    found = sorted({file.parent for file in path.glob("collected/factors/*/*.safetensors")})
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{path}: has several collections. Name one: {', '.join(map(str, found))}")
    seen = (
        "has no .safetensors file and no collected factors" if path.is_dir() else "there is no such directory"
    )
    raise ConfigError(f"{path}: {seen}. Give a directory of Hessian factors (docs/hessians.md).")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}). Make it anew.") from error


def _value(text: str) -> Any:
    """A metadata value: JSON, or plain text from other programs."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _check_metadata(file: Path, metadata: dict[str, Any]) -> None:
    """Raise ConfigError for a layout of the future, counts that are none, and an H_in shared in no readable way."""
    if metadata.get("layout", LAYOUT) != LAYOUT:
        raise ConfigError(
            f"{file}: expected layout {LAYOUT}, seen {metadata['layout']}. Use the version of bakron that made it."
        )
    for key in COUNTS:
        count = metadata.get(key, 1)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(
                f"{file}: {key}: expected a whole number above 0, seen {count!r}. Correct the metadata, or leave it "
                "out if unknown."
            )
    squares = metadata.get("squares_out", {})
    if not isinstance(squares, dict) or not all(
        isinstance(value, float | int) and 0 <= value < float("inf") for value in squares.values()
    ):
        raise ConfigError(
            f"{file}: squares_out: expected a JSON object of numbers ≥ 0 by linear, seen {squares!r}. Leave it out if "
            "unknown."
        )
    shared = metadata.get("shared_H_in", {})
    if not isinstance(shared, dict) or not all(isinstance(other, str) for other in shared.values()):
        raise ConfigError(
            f"{file}: shared_H_in: expected a JSON object of names of linears, seen {shared!r}."
        )


def _size(what: str, shape: tuple[int, ...]) -> int:
    """n of a packed triangle or a matrix. Raises ShapeError."""
    if len(shape) == 2 and shape[0] == shape[1]:
        return shape[0]
    if len(shape) != 1:
        raise ShapeError(f"{what}: expected (n, n) or a packed triangle (n(n+1)/2,), seen {shape}.")
    try:
        return packed_size(shape[0])
    except ShapeError as error:
        raise ShapeError(f"{what}: {error}") from error


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()) if tensor.numel() else True
