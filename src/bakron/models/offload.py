"""Blocks whose parameters stay in files: one of them at a time is in memory, the one that was used last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_submodules
from torch import Tensor, nn

from bakron.models.checkpoint import require_finite
from bakron.models.structure import find_blocks, refuse_fused_experts


def device_map(skeleton: nn.Module, device: torch.device) -> dict[str, str]:
    """What transformers has to be told, so that it leaves the parameters of blocks on disk and loads the others.

    skeleton: the model on the meta device.  Raises ModelError for experts fused in one parameter.
    """
    root, blocks = find_blocks(skeleton)
    for b, block in enumerate(blocks):
        refuse_fused_experts(block, f"{root}.{b}")
    tensors = [*skeleton.named_parameters(remove_duplicate=False), *skeleton.named_buffers()]
    outside = {name: str(device) for name, _ in tensors if not name.startswith(f"{root}.")}
    return outside | {f"{root}.{b}": "disk" for b in range(len(blocks))}


class OffloadedBlocks:
    """Fills a block with its parameters when it runs, and empties the one that was full before.

    A block's own forward asks for it, so whoever calls blocks need not know.  What is written into parameters goes with
    the block, unless ``replace`` was told to write it again.
    device: where blocks run.  full: the number of the block that is in memory, if one is.
    """

    def __init__(self, model: nn.Module, device: torch.device, kept: Any = None) -> None:
        """model: loaded by transformers with ``device_map``.  kept: has to live as long as the files are read.

        accelerate's hooks tell where each parameter is. They are taken off then, for they read it at every call.
        """
        self.device, self.kept = device, kept
        self.root, self.blocks = find_blocks(model)
        self.full: int | None = None
        self._replacements: dict[int, Callable[[], None]] = {}
        self._empty = [dict(block.named_parameters()) for block in self.blocks]
        self._readers = [_readers(block) for block in self.blocks]
        remove_hook_from_submodules(model)
        for b, block in enumerate(self.blocks):
            block.forward = self._filling(b, block.forward)

    def fill(self, b: int) -> None:
        """Have the parameters of block b in memory. Raises NonFiniteError naming those with NaN or infinity."""
        if self.full == b:
            return
        self._empty_full()
        parameters = {name: read().to(self.device) for name, read in self._readers[b].items()}
        require_finite({f"{self.root}.{b}.{name}": value for name, value in parameters.items()})
        self.blocks[b].load_state_dict(parameters, strict=False, assign=True)
        self.full = b
        try:
            self._replacements.get(b, lambda: None)()
        except BaseException:
            self._empty_full()  # or the block would pass for one that has been changed
            raise

    def replace(self, b: int, write: Callable[[], None]) -> None:
        """Call ``write``, which changes parameters of block b, whenever the block is filled from now on."""
        self._replacements[b] = write
        if self.full == b:
            self._empty_full()

    def _empty_full(self) -> None:
        if self.full is not None:
            self.blocks[self.full].load_state_dict(self._empty[self.full], strict=False, assign=True)
            self.full = None

    def _filling(self, b: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def filled(*args: Any, **kwargs: Any) -> Any:
            self.fill(b)
            return forward(*args, **kwargs)

        return filled


def _readers(block: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """What reads each parameter from its file, in the model's dtype, by its name in the block."""
    readers: dict[str, Callable[[], Tensor]] = {}
    for path, module in block.named_modules():
        for key, _ in module.named_parameters(recurse=False):
            weights: Any = module._hf_hook.weights_map  # noqa: SLF001 - nothing else tells where transformers found it
            readers[f"{path}.{key}" if path else key] = lambda weights=weights, key=key: weights[key]
    return readers
