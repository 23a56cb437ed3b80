"""llm-compressor's own ``quantize_weight`` on one weight and Hessian, with act-order and static groups."""

from __future__ import annotations

from collections.abc import Callable

import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from serve import serve
from torch import Tensor


def prepare(W: Tensor, H_in: Tensor, scale: Tensor, percdamp: float) -> Callable[[], Tensor]:
    """A batch of one weight, whose scales are known already; its buffers are the function's to overwrite."""
    arguments = QuantizationArgs(
        num_bits=4, symmetric=True, strategy="group", group_size=128, actorder="static"
    )
    batch = [tensor[None].clone() for tensor in (W, H_in, scale, torch.zeros_like(scale))]
    return lambda: quantize_weight(*batch, None, arguments, percdamp=percdamp)[0][0]


if __name__ == "__main__":
    serve("llmcompressor", prepare)
