"""Slow and independent: inputs, outputs and gradients of linears, by plain autograd over an entire transformers model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D


class Observed(NamedTuple):
    """Of one linear and one sequence: x (T, d_in), y and g = ∂ℓ/∂y (T, d_out), G = ∂ℓ/∂W (d_out, d_in); float64."""

    x: Tensor
    y: Tensor
    g: Tensor
    G: Tensor


def load_whole(path: Path) -> Any:
    """The float32 model, as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def logits(model: Any, ids: Tensor) -> Tensor:
    """(T, V), one forward of the entire model."""
    return model(ids[None], use_cache=False).logits[0]


def sampled_labels(model: Any, ids: Tensor, seed: int, index: int, sample: int = 0) -> Tensor:
    """Labels (T,) of calibration sequence ``index``: a uniform number a token, through the inverse of the cumulative
    distribution of the model's own prediction. Numbers of further samples follow in the same stream."""
    with torch.no_grad():
        p = logits(model, ids).softmax(-1).double()
    generator = torch.Generator().manual_seed(1_000_003 * seed + index)
    u = torch.rand(sample + 1, len(ids), 1, generator=generator, dtype=torch.float64)[-1]
    return (p.cumsum(-1) <= u * p.sum(-1, keepdim=True)).sum(-1)


def observe(
    model: Any, ids: Tensor, names: Iterable[str], labels: Tensor | None = None
) -> dict[str, Observed]:
    """One ``Observed`` a name, ℓ = −Σ_t log p(label_t); ``labels`` None takes the ids themselves."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _module, args, y, name=name: seen.update({name: (args[0], y)})
        )
        for name in names
    ]
    try:
        model.requires_grad_(True)
        loss = torch.nn.functional.cross_entropy(
            logits(model, ids).float(), ids if labels is None else labels, reduction="sum"
        )
    finally:
        for handle in handles:
            handle.remove()
    weights = {name: model.get_submodule(name).weight for name in seen}
    wanted = [*(y for _, y in seen.values()), *weights.values()]
    gradients = torch.autograd.grad(loss, wanted)
    result = {}
    for i, (name, (x, y)) in enumerate(seen.items()):
        G = gradients[len(seen) + i]
        parts = (x, y, gradients[i], G.T if isinstance(model.get_submodule(name), Conv1D) else G)
        result[name] = Observed(*(part.detach().flatten(0, -2).double() for part in parts))
    return result


def set_weight(model: Any, name: str, weight: Tensor) -> None:
    """Overwrite a linear's weight with (d_out, d_in) values."""
    module = model.get_submodule(name)
    with torch.no_grad():
        module.weight.copy_(weight.T if isinstance(module, Conv1D) else weight)


def assert_near(seen: Tensor | None, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Equal shapes, and no entry further off than ``tolerance`` × the largest expected one."""
    assert seen is not None and seen.shape == expected.shape
    error = float((seen.double() - expected.double()).abs().max())
    largest = float(expected.abs().max())
    assert error <= tolerance * largest, f"off by {error:.3g}, largest entry {largest:.3g}"
