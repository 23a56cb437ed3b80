"""Kernels, one module each with a ``round_tile``; a module's name is the kernel's name in the configuration."""

from __future__ import annotations

import importlib
import pkgutil

import torch

from bakron.core.refine import PanelKernel
from bakron.core.solver import TileKernel
from bakron.errors import ConfigError


def kernel_names() -> list[str]:
    """The names of the kernels in this package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get_kernel(name: str, device: torch.device) -> TileKernel:
    """The tile kernel called ``name``; ``auto`` is numba on a CPU and torch elsewhere. Raises ConfigError."""
    if name == "auto":
        name = "numba" if device.type == "cpu" else "torch"
    if name not in kernel_names():
        known = ", ".join(["auto", "reference", *kernel_names()])
        raise ConfigError(f"kernel: {name!r} is not one of {known}.")
    return importlib.import_module(f"{__name__}.{name}").round_tile


def get_panel_kernel(device: torch.device) -> PanelKernel:
    """The kernel of coordinate descent for ``device``: numba on a CPU and torch elsewhere, which make the same moves."""
    name = "numba" if device.type == "cpu" else "torch"
    return importlib.import_module(f"{__name__}.{name}").descend_panel
