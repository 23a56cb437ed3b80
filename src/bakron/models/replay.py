"""Calling one decoder block as the model would: all arguments but the hidden state depend on length only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CACHE_BYTES = 512 * 2**20


class StopForward(Exception):
    """Ends a model's forward early, carrying the hidden state (1, T, d) that was wanted."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the forward pass was ended on purpose")
        self.hidden = hidden


@dataclass(frozen=True)
class BlockCall:
    """The arguments of a block's call besides its hidden state, which comes first or by keyword."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: bool

    def __call__(self, block: Callable[..., Any], hidden: Tensor) -> Tensor:
        """Run ``block``, or the forward of one, on hidden (1, T, d); returns (1, T, d)."""
        if self.keyword:
            out = block(*self.args, hidden_states=hidden, **self.kwargs)
        else:
            out = block(hidden, *self.args, **self.kwargs)
        return out[0] if isinstance(out, tuple) else out


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, BlockCall]:
    """The hidden state of a recorded call, and the rest of it."""
    if args:
        return args[0], BlockCall(args[1:], kwargs, keyword=False)
    rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
    return kwargs["hidden_states"], BlockCall((), rest, keyword=True)


@contextmanager
def stubbed(blocks: Sequence[nn.Module], stub: Callable[..., Any]) -> Iterator[None]:
    """Within, every block's forward is ``stub(b, hidden, call)``; the blocks are whole again afterwards."""

    def forward(b: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: stub(b, *split_call(args, kwargs))

    saved = [block.__dict__.get("forward") for block in blocks]
    try:
        for b, block in enumerate(blocks):
            block.forward = forward(b)
        yield
    finally:
        for block, old in zip(blocks, saved, strict=True):
            block.__dict__.pop("forward", None)
            if old is not None:
                block.forward = old


class CallCache:
    """The calls of all blocks per sequence length; beyond a budget of bytes the least recently used go."""

    def __init__(self, record: Callable[[int], list[BlockCall]], max_bytes: int = CACHE_BYTES) -> None:
        self.record = record
        self.max_bytes = max_bytes
        self.entries: OrderedDict[int, tuple[list[BlockCall], int]] = OrderedDict()
        self.bytes = 0

    def get(self, length: int) -> list[BlockCall]:
        """The calls at this length, recorded when not at hand."""
        if length in self.entries:
            self.entries.move_to_end(length)
            return self.entries[length][0]
        calls = self.record(length)
        size = _size([(call.args, call.kwargs) for call in calls])
        while self.entries and self.bytes + size > self.max_bytes:
            self.bytes -= self.entries.popitem(last=False)[1][1]
        self.entries[length] = (calls, size)
        self.bytes += size
        return calls


def _size(tree: Any) -> int:
    """Bytes of the distinct tensor storages in nested containers."""
    storages: dict[int, int] = {}

    def visit(node: Any) -> None:
        if isinstance(node, torch.Tensor):
            storage = node.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(node, dict):
            for value in node.values():
                visit(value)
        elif isinstance(node, (tuple, list)):
            for value in node:
                visit(value)

    visit(tree)
    return sum(storages.values())
