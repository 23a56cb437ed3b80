"""GPTQModel's GPTQ on a whole model, read back from the checkpoint that it writes.

Options are those of its ``QuantizeConfig``.
"""

from __future__ import annotations

import tempfile

import torch
from gptqmodel import BACKEND, GPTQModel
from gptqmodel.quantization import QuantizeConfig
from torch import Tensor
from whole import Request, answer, bits_per_weight


def quantize(request: Request) -> dict[str, Tensor]:
    """The linears as its own torch kernel dequantizes them, scales in float16 as it stores them."""
    config = QuantizeConfig(
        bits=request.bits,
        group_size=request.group_size,
        sym=request.symmetric,
        device="cpu",  # load() takes none beside it
        pack_impl="original",  # the other one compiles for minutes
        offload_to_disk=False,
        **request.options,
    )
    model = GPTQModel.load(request.model, config, dtype=torch.float32)
    with request.measured():
        model.quantize([{k: v[0] for k, v in b.items()} for b in request.batches()], batch_size=1)
    request.facts["bits_per_weight"] = bits_per_weight(
        request.bits, request.group_size, 0 if request.symmetric else request.bits
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        stored = GPTQModel.load(folder, device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
        return {
            f"{name}.weight": module.dequantize_weight().T
            for name, module in stored.model.named_modules()
            if hasattr(module, "dequantize_weight")
        }


if __name__ == "__main__":
    answer("gptqmodel", quantize)
