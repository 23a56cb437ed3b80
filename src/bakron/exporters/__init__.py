"""Checkpoint formats: one file per format, found by its name; a new file is a new format, with no list to edit.

A format is a module that defines ``EXPORTER``, an object with the methods of :class:`Exporter`. Packages outside
bakron add formats through entry points of the group ``bakron.exporters``, each naming such an object.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

import torch
from torch import Tensor

from bakron.core.layers import LinearSpec, Scheme, SolvedLayer
from bakron.errors import ConfigError

ENTRY_POINT_GROUP = "bakron.exporters"


class Exporter(Protocol):
    """What every checkpoint format can do."""

    name: str

    def check(self, layers: Mapping[Scheme, Sequence[LinearSpec]]) -> None:
        """Raise FormatError, naming every layer that this format cannot hold in its scheme, or schemes together."""

    def stored_bytes(self, d_out: int, d_in: int, scheme: Scheme, dtype: torch.dtype) -> int:
        """The bytes that a (d_out, d_in) weight takes on disk; dtype: that of the scales."""
        ...

    def tensors(self, layer: SolvedLayer) -> dict[str, Tensor]:
        """What replaces the layer's weight in the checkpoint, by full tensor name."""
        ...

    def quantization_config(
        self, layers: Mapping[Scheme, Sequence[str]], ignore: Sequence[str]
    ) -> dict[str, Any] | None:
        """The ``quantization_config`` of config.json, or None.

        layers: the names of the linear modules in each scheme.  ignore: those left as they were.
        """
        ...

    def usage(self, schemes: Collection[Scheme]) -> str:
        """Python lines that load the checkpoint at ``path``, for the model card."""
        ...


def exporter_names() -> list[str]:
    """The names of all formats found, sorted."""
    return sorted({*_own_names(), *(point.name for point in _outside())})


def get_exporter(name: str) -> Exporter:
    """The format of this name (``-`` and ``_`` are the same; our own come before those of other packages).

    Raises ConfigError, listing the formats found, when there is none of this name.
    """
    wanted = name.replace("-", "_")
    if wanted in _own_names():
        return importlib.import_module(f"{__name__}.{wanted}").EXPORTER
    for point in _outside():
        if point.name.replace("-", "_") == wanted:
            return point.load()
    raise ConfigError(f"unknown export format {name!r}: expected one of {', '.join(exporter_names())}")


def _own_names() -> list[str]:
    """Modules of this package that define EXPORTER; the others are helpers."""
    modules = [module.name for module in pkgutil.iter_modules(__path__)]
    return [name for name in modules if hasattr(importlib.import_module(f"{__name__}.{name}"), "EXPORTER")]


def _outside() -> list[EntryPoint]:
    return sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)
