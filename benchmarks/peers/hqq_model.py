"""HQQ, which needs no calibration text, on a whole model.

Options are those of its ``BaseQuantizeConfig``; axis 1 has its groups along the inputs, as everybody else's are.
"""

from __future__ import annotations

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from hqq.models.hf.base import AutoHQQHFModel
from torch import Tensor
from whole import Request, answer, bits_per_weight, load_model

STORED_BITS = {3: 3.2}  # ten codes in 32 bits


def quantize(request: Request) -> dict[str, Tensor]:
    """The linears as its layers dequantize them, scales and zero points in float32 here."""
    model = load_model(request.model)
    config = BaseQuantizeConfig(nbits=request.bits, group_size=request.group_size, **request.options)
    with request.measured():
        AutoHQQHFModel.quantize_model(model, config, compute_dtype=torch.float32, device="cpu")
    stored = STORED_BITS.get(request.bits, request.bits)
    request.facts["bits_per_weight"] = bits_per_weight(stored, request.group_size, zero_bits=16)
    return {
        f"{name}.weight": module.dequantize()
        for name, module in model.named_modules()
        if isinstance(module, HQQLinear)
    }


if __name__ == "__main__":
    answer("hqq", quantize)
