"""GPTQModel's own ``GPTQ.quantize`` on one weight and Hessian, with act-order and static groups.

It takes no scales: it computes the same ones (largest weight / 7.5) itself, in a small part of its time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.quantization.gptq import GPTQ
from serve import serve
from torch import Tensor


def prepare(W: Tensor, H_in: Tensor, scale: Tensor, percdamp: float) -> Callable[[], Tensor]:
    """A task that has summed this Hessian already."""
    config = QuantizeConfig(bits=4, group_size=128, sym=True, desc_act=True, act_group_aware=False)
    config.static_groups, config.damp_percent = True, percdamp
    module = torch.nn.Linear(W.shape[1], W.shape[0], bias=False)
    module.weight = torch.nn.Parameter(W, requires_grad=False)
    task = GPTQ(module, config)
    task.quantizer.configure(perchannel=True)
    task.H, task.nsamples = H_in, 1
    return lambda: task.quantize()[0]


if __name__ == "__main__":
    serve("gptqmodel", prepare)
