"""Streams a source checkpoint into a new one with the quantized weights replaced: atomic, checked, deterministic.

Everything is written into a sibling directory ``.NAME.partial`` that is renamed at the end, so that the output
is either absent or whole. Tensors that are neither quantized nor changed are copied bit for bit; at most one shard of
the source is in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bakron.core.layers import Scheme, SolvedLayer
from bakron.errors import ConfigError, OutputExistsError
from bakron.exporters import Exporter
from bakron.exporters.checkpoint import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, Checkpoint
from bakron.exporters.checks import check_finite, check_layer
from bakron.exporters.plan import CARD_NAME, Changes, auxiliary_files, check_disk, plan_export

MAX_SHARD_BYTES = 4_000_000_000

Layers = Mapping[str, Callable[[], SolvedLayer]]
Progress = Callable[[int, int, str], None]


def write_checkpoint(
    source: Path,
    out: Path,
    exporter: Exporter,
    layers: Layers,
    schemes: Mapping[str, Scheme],
    *,
    ignore: Sequence[str],
    card: str,
    extra: Mapping[str, str] | None = None,
    changes: Changes | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write ``out``, a copy of ``source`` with the given layers stored by ``exporter``; returns ``out``.

    layers: source tensor name -> function that returns the solved layer, called once, when its turn comes.
    schemes: source tensor name -> how the layer is stored, for the same names.
    ignore: names of all modules that are linear in the model but not in layers (``lm_head``, also when tied; routers).
    card: the text of README.md.  extra: further text files by name.  changes: of other tensors and of config.json.
    max_shard_bytes: a new file starts before it would grow beyond (a single layer is never split).
    progress(done, total, name): called after every tensor.

    Raises OutputExistsError (out is not empty and overwrite is off, or is no checkpoint), FormatError (the source or
    a layer does not fit), NonFiniteError (names the tensor), DiskSpaceError, ConfigError. On any failure nothing is
    left behind and what was in out is untouched.
    """
    source, out = Path(source), Path(out)
    check_output(source, out, overwrite)
    changes = changes or Changes()
    plan = plan_export(source, exporter, schemes, changes)
    checkpoint = Checkpoint(source)
    _check_ignore(layers, ignore)
    out.parent.mkdir(parents=True, exist_ok=True)
    check_disk(out.parent, plan)
    partial = out.parent / f".{out.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        names: dict[Scheme, list[str]] = {}
        units = _units(checkpoint, exporter, layers, schemes, plan.scale_dtype, changes, names, progress)
        _write_shards(partial, units, max_shard_bytes)
        _copy_auxiliary(source, partial)
        quantization = exporter.quantization_config(names, ignore)
        block = {} if quantization is None else {"quantization_config": quantization}
        _write_config(source, partial, {**changes.config, **block})
        for name, text in {CARD_NAME: card, **(extra or {})}.items():
            (partial / name).write_text(text, encoding="utf-8")
        _sync(partial)
        _move(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def check_output(source: Path, out: Path, overwrite: bool) -> None:
    """Refuse to touch the source or anything that is not empty, unless it is a checkpoint to be overwritten."""
    here, there = source.resolve(), out.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise OutputExistsError(
            f"{out} and the source {source} contain each other; choose a directory outside of it"
        )
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise OutputExistsError(f"{out} exists and is no directory; choose another output")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise OutputExistsError(f"{out} is not empty; choose another output, or ask to overwrite it")
    if not (out / CONFIG_NAME).is_file():
        raise OutputExistsError(
            f"{out} is not a checkpoint (no {CONFIG_NAME}), so it is not overwritten; empty it"
        )


def _check_ignore(layers: Layers, ignore: Sequence[str]) -> None:
    both = sorted(name for name in ignore if f"{name}.weight" in layers)
    if both:
        raise ConfigError(
            f"these modules are quantized and also in the list of ignored ones: {', '.join(both)}"
        )


def _units(
    checkpoint: Checkpoint,
    exporter: Exporter,
    layers: Layers,
    schemes: Mapping[str, Scheme],
    dtype: torch.dtype,
    changes: Changes,
    names: dict[Scheme, list[str]],
    progress: Progress | None,
) -> Iterator[dict[str, Tensor]]:
    """The tensors of the output in order, those of one layer together; every one is checked to be finite.

    names: gets the names of the layers in each scheme, as they pass.
    """
    added = changes.added(checkpoint)
    total = len(checkpoint.infos) + len(added)
    kept = checkpoint.values(skip={*layers, *changes.tensors})
    for done, (key, value) in enumerate(chain(kept, added.items()), start=1):
        origin = "its source"
        if key in changes.tensors:
            unit, origin = {key: changes.tensors[key].contiguous()}, "the transformed model"
        elif value is not None:
            unit = {key: value}
        else:
            layer = layers[key]()
            check_layer(layer, key, checkpoint.infos[key].shape, schemes[key], dtype)
            exporter.check({layer.scheme: [layer.spec]})
            names.setdefault(layer.scheme, []).append(layer.spec.name)
            unit, origin = exporter.tensors(layer), "the solved layer"
        for name, tensor in unit.items():
            check_finite(name, tensor, origin)
        yield unit
        if progress:
            progress(done, total, key)


def _write_shards(directory: Path, units: Iterator[dict[str, Tensor]], max_bytes: int) -> None:
    """Write the units as one file, or as shards with an index that lists exactly them."""
    shards: list[dict[str, int]] = []  # tensor name -> bytes, per file written
    waiting: dict[str, Tensor] = {}
    for unit in units:
        if waiting and _n_bytes(waiting) + _n_bytes(unit) > max_bytes:
            shards.append(_flush(directory / f"shard-{len(shards)}", waiting))
            waiting = {}
        waiting.update(unit)
    shards.append(_flush(directory / f"shard-{len(shards)}", waiting))
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / SINGLE_NAME)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{i}").rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    total = sum(sum(names.values()) for names in shards)
    _write_json(
        directory / INDEX_NAME,
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def _flush(file: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes files that only their owner reads
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def _n_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _copy_auxiliary(source: Path, directory: Path) -> None:
    for name in auxiliary_files(source):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, directory / name)


def _write_config(source: Path, directory: Path, entries: dict[str, Any]) -> None:
    """config.json with these entries; as it was, byte for byte, when there are none."""
    if not entries:
        shutil.copyfile(source / CONFIG_NAME, directory / CONFIG_NAME)
        return
    config = json.loads((source / CONFIG_NAME).read_text(encoding="utf-8"))
    _write_json(directory / CONFIG_NAME, {**config, **entries})


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(directory: Path) -> None:
    """Make sure that all files are on the disk before the rename says so."""
    for path in [*(path for path in directory.rglob("*")), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _move(partial: Path, out: Path) -> None:
    """Put the finished directory in place; what it replaces is removed only after that."""
    if not out.exists():
        partial.rename(out)
        return
    old = partial.with_suffix(".old")
    out.rename(old)
    try:
        partial.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old)
