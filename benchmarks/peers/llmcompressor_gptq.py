"""llm-compressor's own ``quantize_weight`` on one weight and Hessian, with act-order and static groups."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from serve import serve
from torch import Tensor


def prepare(W: Tensor, H_in: Tensor, scale: Tensor, percdamp: float) -> Callable[[], Tensor]:
    """A linear module with an observer that knows the scales already."""
    arguments = QuantizationArgs(
        num_bits=4, symmetric=True, strategy="group", group_size=128, actorder="static"
    )
    known = {"scale": scale, "zero_point": torch.zeros_like(scale), "global_scale": None}
    module = torch.nn.Linear(W.shape[1], W.shape[0], bias=False)
    module.weight = torch.nn.Parameter(W, requires_grad=False)
    module.weight_observer = SimpleNamespace(get_qparams=lambda: known)
    return lambda: quantize_weight(module, arguments, H_in, percdamp=percdamp)[1]["weight"]


if __name__ == "__main__":
    serve("llmcompressor", prepare)
