"""How tensors flow between the modules of a decoder, found by running it: which linears read a norm, and which channels
pass from one linear to another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bakron.models.structure import LINEAR_TYPES

if TYPE_CHECKING:
    from bakron.models.decoder import Decoder

TRACE_LENGTH = 4


@dataclass(frozen=True)
class Norm:
    """A normalisation whose output linears read as it is.

    name: its module's path.  readers: names of those linears, head and routers too.  offset: its gain is weight + offset
    (1 in Gemma, else 0).  centres: it subtracts the mean (LayerNorm).
    """

    name: str
    readers: tuple[str, ...]
    offset: int
    centres: bool


@dataclass(frozen=True)
class Passage:
    """Channel j of the input of the linear ``reader`` is channel rows[j] of the output of the linear ``writer``, times
    something that does not depend on this output.  rows: (d_in of reader,) integers.
    """

    writer: str
    reader: str
    rows: Tensor


def find_norms(decoder: Decoder) -> list[Norm]:
    """All norms that linears read, in order of execution, by one short forward."""
    made: dict[tuple[int, int], str] = {}
    alive: list[Tensor] = []  # or another tensor could take the place of one that was freed
    readers: dict[str, list[str]] = {}

    def place(x: Tensor) -> tuple[int, int]:
        return x.data_ptr(), x.numel()  # a view of the whole is the same: heads read slices of all positions

    def after_norm(name: str, y: Tensor) -> None:
        made[place(y)] = name
        alive.append(y)

    def before_linear(name: str, x: Tensor) -> None:
        if place(x) in made:
            readers.setdefault(made[place(x)], []).append(name)

    handles = []
    for name, module in decoder.model.named_modules():
        if isinstance(module, LINEAR_TYPES):
            handles.append(
                module.register_forward_pre_hook(lambda _m, args, name=name: before_linear(name, args[0]))
            )
        elif _has_gain(module):
            handles.append(module.register_forward_hook(lambda _m, _a, y, name=name: after_norm(name, y)))
    try:
        decoder.logits(torch.arange(TRACE_LENGTH))
    finally:
        for handle in handles:
            handle.remove()
    return [_norm(decoder, name, tuple(names)) for name, names in readers.items()]


def _has_gain(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.ndim == 1


def _norm(decoder: Decoder, name: str, readers: tuple[str, ...]) -> Norm:
    """What the module called ``name`` does, seen from its outputs for other gains and for a shifted input."""
    module = decoder.model.get_submodule(name)
    weight = module.get_parameter("weight")
    x = _random_state(decoder, len(weight))
    with torch.no_grad():
        at_zero = functional_call(module, {"weight": torch.zeros_like(weight)}, (x,))
        bias = getattr(module, "bias", None)
        offset = int(not torch.equal(at_zero, torch.zeros_like(x) if bias is None else bias.expand_as(x)))
        plain = {"weight": torch.full_like(weight, 1 - offset)}
        y, shifted = (functional_call(module, plain, (of,)) for of in (x, x + 1))
    return Norm(name, readers, offset, centres=bool((shifted - y).norm() < 1e-3 * y.norm()))


def find_values(decoder: Decoder, b: int) -> Passage | None:
    """The passage of attention's values in block b: with a single token, attention hands them on as they are.

    Seen by putting row numbers in place of a linear's outputs, so that fused linears and shared heads need no table.
    """
    linears = decoder.linears[b]
    for i, writer in enumerate(linears):
        numbers = torch.arange(writer.d_out, device=decoder.device, dtype=decoder.dtype)
        inputs = _inputs(decoder, b, writer.name, lambda y, numbers=numbers: numbers.expand_as(y))
        for reader in linears[i + 1 :]:
            x = inputs[reader.name][0] if reader.name in inputs else numbers.new_full((1,), -1)
            if bool((x == x.round()).all() and (x >= 0).all() and (x < writer.d_out).all()):
                return Passage(writer.name, reader.name, x.long().cpu())
    return None


def find_products(decoder: Decoder, b: int) -> list[Passage]:
    """The passages of block b in which each channel is multiplied by something: up and down of gated MLPs.

    Seen by multiplying a linear's outputs by powers of two, which must multiply another's input by them exactly.
    """
    values = find_values(decoder, b)
    linears = decoder.linears[b]
    generator = torch.Generator().manual_seed(0)
    original = _inputs(decoder, b, linears[0].name, lambda y: y)
    found = []
    for reader in linears:
        if reader.name not in original or (values and reader.name == values.reader):
            continue
        x = original[reader.name]
        factors = 2.0 ** torch.randint(0, 4, x.shape, generator=generator).to(x)
        for writer in linears[: linears.index(reader)]:
            for start in range(0, writer.d_out - reader.d_in + 1, reader.d_in):
                rows = slice(start, start + reader.d_in)
                inputs = _inputs(
                    decoder, b, writer.name, lambda y, rows=rows, by=factors: _times(y, rows, by)
                )
                if torch.equal(inputs[reader.name], x * factors):
                    found.append(Passage(writer.name, reader.name, torch.arange(start, start + reader.d_in)))
    return found


def _times(y: Tensor, rows: slice, factors: Tensor) -> Tensor:
    y = y.clone()
    y[..., rows] *= factors
    return y


def _inputs(decoder: Decoder, b: int, writer: str, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The inputs (1, d_in) of block b's linears on one random token, with the outputs of ``writer`` changed."""

    def hook(_module: nn.Module, _args: Any, y: Tensor) -> Tensor:
        return change(y)

    handle = decoder.model.get_submodule(writer).register_forward_hook(hook)
    try:
        return decoder.run_block_capturing(b, _random_state(decoder, decoder.hidden_size))[1]
    finally:
        handle.remove()


def _random_state(decoder: Decoder, size: int) -> Tensor:
    state = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
    return state.to(decoder.device, decoder.dtype)
