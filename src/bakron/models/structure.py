"""Where a model's decoder blocks and quantizable linears are, by its structure and one short forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from bakron.errors import ModelError
from bakron.models.families import EXPERT_COUNT_FIELDS, ROUTER_NAMES

LINEAR_TYPES = (nn.Linear, Conv1D)


def find_blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Path and modules of the decoder blocks: the longest outermost ``ModuleList`` of one class with linears.

    Raises ModelError when there is none.
    """
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        nested = any(name.startswith(f"{other}.") for other in found)
        if isinstance(module, nn.ModuleList) and not nested and _is_block_list(module):
            found[name] = module
    if not found:
        raise ModelError(
            f"{type(model).__name__}: no list of decoder blocks with linear layers was found. bakron "
            "quantizes decoders whose blocks are one ModuleList of modules of one class."
        )
    path = max(found, key=lambda name: len(found[name]))
    return path, list(found[path])


def _is_block_list(modules: nn.ModuleList) -> bool:
    one_class = len({type(module) for module in modules}) == 1
    return one_class and all(any(isinstance(m, LINEAR_TYPES) for m in block.modules()) for block in modules)


def find_linears(block: nn.Module, prefix: str, n_experts: int | None) -> dict[str, nn.Module]:
    """The quantizable linears of a block by full name, in order of definition; routers are left out.

    n_experts: what ``expert_count`` says.  Raises ModelError for experts fused in one parameter.
    """
    refuse_fused_experts(block, prefix)
    routers = set(_routers(block, n_experts))
    return {
        f"{prefix}.{name}": module
        for name, module in block.named_modules()
        if isinstance(module, LINEAR_TYPES) and name not in routers
    }


def _routers(block: nn.Module, n_experts: int | None) -> Iterator[str]:
    """Names of the linears that choose or weigh experts: those of a module that also has ``experts``."""
    for owner_name, owner in block.named_modules():
        if not hasattr(owner, "experts"):
            continue
        for name, module in owner.named_modules():
            if not isinstance(module, LINEAR_TYPES) or name.startswith("experts."):
                continue
            if ROUTER_NAMES & set(name.split(".")) or weight_shape(module)[0] == n_experts:
                yield f"{owner_name}.{name}".removeprefix(".")


def refuse_fused_experts(block: nn.Module, prefix: str) -> None:
    """Raises ModelError naming the parameters of ``block`` that hold many matrices in one (3-D) tensor."""
    fused = [
        f"{prefix}.{name}.{key}"
        for name, module in block.named_modules()
        if not isinstance(module, nn.modules.conv._ConvNd)
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 2
    ]
    if fused:
        raise ModelError(
            f"{', '.join(fused)}: experts fused in one parameter of three dimensions, which bakron cannot "
            "quantize yet. Expected one linear module per matrix; use a dense model."
        )


def expert_count(config: Any) -> int | None:
    """The number of routed experts that a configuration states, if any."""
    counts = [getattr(config, field, None) for field in EXPERT_COUNT_FIELDS]
    return next((count for count in counts if isinstance(count, int) and count > 1), None)


def weight_shape(module: nn.Module) -> tuple[int, int]:
    """(d_out, d_in) of a linear or a ``Conv1D``, whose stored weight is transposed."""
    rows, columns = module.get_parameter("weight").shape
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)


def trace(
    model: nn.Module, ids: Tensor, blocks: list[nn.Module], linears: list[dict[str, nn.Module]]
) -> tuple[list[list[tuple[str, ...]]], bool]:
    """Run the model once on ids (1, T) and see which linears receive the very same tensor.

    Returns per block the groups of linears in order of execution (a linear that did not run, such as an
    expert without tokens, comes last, by itself), and whether blocks return tuples.
    """
    seen: list[list[tuple[Tensor, list[str]]]] = [[] for _ in blocks]
    returns_tuple: list[bool] = []

    def note_linear(b: int, name: str, x: Tensor) -> None:
        for tensor, names in seen[b]:
            if tensor is x:
                names.append(name)
                return
        seen[b].append((x, [name]))

    handles = [block.register_forward_hook(lambda _m, _a, y: returns_tuple.append(isinstance(y, tuple)))
               for block in blocks]  # fmt: skip
    for b, named in enumerate(linears):
        for name, module in named.items():
            hook = lambda _m, args, b=b, name=name: note_linear(b, name, args[0])  # noqa: E731
            handles.append(module.register_forward_pre_hook(hook))
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if len(returns_tuple) != len(blocks):
        raise ModelError(
            f"{type(model).__name__}: expected each of its {len(blocks)} blocks to run once, seen "
            f"{len(returns_tuple)} runs. bakron quantizes decoders that run their blocks one after another."
        )
    return [
        _groups(block_seen, named) for block_seen, named in zip(seen, linears, strict=True)
    ], returns_tuple[0]


def _groups(seen: list[tuple[Tensor, list[str]]], named: dict[str, nn.Module]) -> list[tuple[str, ...]]:
    groups = [tuple(names) for _, names in seen]
    ran = {name for group in groups for name in group}
    return groups + [(name,) for name in named if name not in ran]
