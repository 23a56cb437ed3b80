"""Kernels that round inside tiles, one module each; a module's name is the kernel's name in the configuration.

A module has ``round_tile`` (one tile; ``core.solver`` chooses the order) or ``round_tiles`` (all tiles of a block
anti-diagonal; ``core.wavefront`` does).
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings

import torch

from bakron.core.refine import PanelKernel
from bakron.core.solver import Kernel
from bakron.core.wavefront import WavefrontKernel
from bakron.errors import ConfigError


def kernel_names() -> list[str]:
    """The names of the kernels in this package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get_kernel(name: str, device: torch.device) -> Kernel:
    """The kernel called ``name``. Raises ConfigError: unknown, or a package that it needs cannot be imported.

    ``auto`` is numba on a CPU, triton on a CUDA GPU, and torch, with a warning that says why, on a GPU without triton
    and on any other device.
    """
    if name == "auto":
        return _automatic(device)
    if name not in kernel_names():
        known = ", ".join(["auto", "reference", *kernel_names()])
        raise ConfigError(f"kernel: {name!r} is not one of {known}.")
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        raise ConfigError(
            f'kernel {name} cannot be imported: {error}. Run pip install "bakron[{name}]" or choose another kernel.'
        ) from error
    return WavefrontKernel(module.round_tiles) if hasattr(module, "round_tiles") else module.round_tile


def _automatic(device: torch.device) -> Kernel:
    if device.type == "cpu":
        return get_kernel("numba", device)
    try:
        if device.type != "cuda":
            raise ConfigError(f"there is no kernel made for device {device}.")
        return get_kernel("triton", device)
    except ConfigError as reason:
        warnings.warn(f"Rounding with the slow kernel torch: {reason}", RuntimeWarning, stacklevel=3)
        return get_kernel("torch", device)


def get_panel_kernel(device: torch.device) -> PanelKernel:
    """The kernel of coordinate descent for ``device``: numba on a CPU and torch elsewhere, which make the same moves."""
    name = "numba" if device.type == "cpu" else "torch"
    return importlib.import_module(f"{__name__}.{name}").descend_panel
