"""Whether a model fits into memory, known before it is loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from bakron.errors import MemorySpaceError

_MEMINFO = Path("/proc/meminfo")


def parameter_bytes(module: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Bytes of all parameters, in ``dtype`` or their own; they may be on the meta device."""
    return sum(p.numel() * (dtype or p.dtype).itemsize for p in module.parameters())


def free_memory(device: torch.device) -> int | None:
    """Bytes that a process can still get on ``device``: of a GPU, or of a machine with Linux; None if nobody tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu" or not _MEMINFO.exists():
        return None
    lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def require_memory(path: Path, needed: int, device: torch.device) -> None:
    """Raise MemorySpaceError when the model at ``path`` needs more bytes than ``device`` has left."""
    free = free_memory(device)
    if free is not None and free < needed:
        raise MemorySpaceError(
            f"{path}: its weights take {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free on {device}. Pass offload "
            "disk, which has one block of them in memory at a time, or a smaller dtype."
        )
