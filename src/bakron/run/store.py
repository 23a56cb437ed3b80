"""Work on disk: files that appear whole or not at all, and a manifest that refuses work made with other settings."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bakron.errors import ConfigError, DiskSpaceError, ResumeError, WorkInUseError
from bakron.run.ranks import ALONE, Ranks

LOCK = "lock"


class Store:
    """A directory of finished pieces of work, made under one set of facts.

    Every file is written under a temporary name and renamed, so that a process may die at any moment.
    Of several ranks the first one writes and says what is there, and all read: the directory must be shared.
    """

    def __init__(self, path: Path, facts: dict[str, Any], ranks: Ranks = ALONE) -> None:
        """Open or create ``path``. Raises ResumeError, naming the fact, when it was made under other ``facts``;
        ConfigError when a rank does not see what the first one wrote.
        """
        self.path, self.ranks = path, ranks
        self.facts = json.loads(json.dumps(facts))
        manifest = path / "manifest.json"
        ranks.from_first(lambda: self._open_or_create(manifest))
        if not manifest.exists():
            raise ConfigError(
                f"{path}: rank {ranks.rank} does not see what rank 0 wrote there. Choose a work directory on a file "
                "system that all machines of the run share."
            )

    def _open_or_create(self, manifest: Path) -> None:
        if manifest.exists():
            _refuse_other(self.path, self.facts, json.loads(manifest.read_text()))
            return
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(manifest, json.dumps(self.facts, indent=1, sort_keys=True) + "\n")

    @property
    def alone(self) -> Store:
        """The same pieces, for work that the first rank does while the others wait."""
        return Store(self.path, self.facts)

    def has(self, name: str) -> bool:
        """Whether the piece called ``name`` is finished."""
        return self.ranks.from_first((self.path / f"{name}.safetensors").exists)

    def save(self, name: str, tensors: dict[str, Tensor], metadata: dict[str, Any] | None = None) -> None:
        """Publish the piece ``name`` as the first rank has it; metadata values are stored as JSON."""
        file = self.path / f"{name}.safetensors"
        self.ranks.from_first(lambda: write_tensors(file, tensors, metadata or {}))

    def load(self, name: str) -> dict[str, Tensor]:
        """The tensors of a finished piece. Raises ResumeError when the file is damaged."""
        with self._open(name) as file:
            return {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118

    def rows(self, name: str, key: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of one tensor of a finished piece. Raises ResumeError when the file is damaged."""
        with self._open(name) as file:
            return file.get_slice(key)[start:stop].clone()

    def metadata(self, name: str) -> dict[str, Any]:
        """The metadata that a finished piece was saved with. Raises ResumeError when the file is damaged."""
        with self._open(name) as file:
            return {
                key: json.loads(value) for key, value in (file.metadata() or {}).items() if key != "format"
            }

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        path = self.path / f"{name}.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise ResumeError(
                f"{path}: cannot be read ({error}). Delete {self.path} and run again to make it anew."
            ) from error

    def remove(self, name: str) -> None:
        """Drop a piece that is no longer needed."""
        self.ranks.from_first(lambda: (self.path / f"{name}.safetensors").unlink(missing_ok=True))


def _refuse_other(path: Path, facts: dict[str, Any], seen: dict[str, Any]) -> None:
    """Raise ResumeError, naming every fact in which ``seen``, those of the work at ``path``, differ from ``facts``."""
    different = [key for key in sorted({*facts, *seen}) if facts.get(key) != seen.get(key)]
    if different:
        before, now = (", ".join(f"{key} = {of.get(key)!r}" for key in different) for of in (seen, facts))
        raise ResumeError(
            f"{path}: made with {before}, now {now}. "
            "Run with the old values to resume, or choose another work directory, or delete this one."
        )


def write_tensors(target: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Publish ``tensors``, and ``metadata`` with its values as JSON, in a file that appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".partial")
    packed = {key: json.dumps(value, sort_keys=True) for key, value in metadata.items()}
    contiguous = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    try:
        save_file(contiguous, temporary, metadata=packed or None)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise DiskSpaceError(
            f"{target}: cannot be written ({error}). Free some space and run again: finished work is kept."
        ) from error
    os.replace(temporary, target)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` so that ``path`` holds the old or the new text, never a part."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def model_fingerprint(path: Path) -> str:
    """sha256 of the configuration and all weight files of a model directory."""
    return files_sha256([path / "config.json", *path.glob("*.safetensors")])


def files_sha256(files: Iterable[Path]) -> str:
    """sha256 of the names and contents of ``files``, in the order of their paths."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


@contextmanager
def held(work: Path, ranks: Ranks = ALONE, keep_work: bool = True) -> Iterator[None]:
    """Keep ``work`` to this run, until it ends in whatever way; left empty, the directory goes.

    keep_work: keep what runs write there when this one ends well.  Raises WorkInUseError when another run has ``work``.
    """
    lock = FileLock(work / LOCK, timeout=0)
    ranks.from_first(lambda: _take(lock, work))
    try:
        yield
        if ranks.first and not keep_work:
            for name in ("collected", "transformed", "solved", "runs", "losses"):
                shutil.rmtree(work / name, ignore_errors=True)
    finally:
        if ranks.first:
            (work / LOCK).unlink(missing_ok=True)  # before another run may take it
            lock.release()
            with suppress(OSError):  # it is not empty, or another run has removed it
                work.rmdir()


def _take(lock: FileLock, work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except Timeout:
        raise WorkInUseError(
            f"{work}: another run is working there. Wait for it, or stop it and run the same command again, which goes "
            "on where it was; or choose another output or work directory."
        ) from None


def require_space(path: Path, needed: int, purpose: str) -> None:
    """Raise DiskSpaceError when the disk of ``path`` has less than ``needed`` bytes left."""
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    if free < needed:
        raise DiskSpaceError(
            f"{path}: {purpose} needs {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free. "
            "Free some space, choose another disk, or use fewer or shorter calibration sequences."
        )


def tensor_sha256(tensor: Tensor) -> str:
    """sha256 of the bytes of ``tensor`` in its own dtype."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
