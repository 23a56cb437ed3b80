"""llm-compressor's GPTQ and AWQ on a whole model, as its ``oneshot`` applies them.

Options: ``recipe``, a list of "gptq" and "awq", where AWQ without GPTQ is followed by plain rounding; ``gptq`` and
``awq``, settings of those modifiers; ``weights``, settings of its ``QuantizationArgs``; ``parts``, true to take inputs anew
after each attention and MLP is quantized, and not only after each block, which is its default.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, forward_quantize
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from torch import Tensor
from torch.utils.data import DataLoader
from whole import Original, Request, answer, bits_per_weight, load_model


def quantize(request: Request) -> dict[str, Tensor]:
    """The linears on their grids, and the norms that AWQ has scaled; scales as they are computed, in float32."""
    model = load_model(request.model)
    original = Original(model)
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_: None  # AWQ pins memory for copies to a GPU, or fails
    with request.measured():
        oneshot(
            model=model,
            dataset=DataLoader(request.batches(), batch_size=None),
            recipe=recipe(request),
            shuffle_calibration_samples=False,
            num_calibration_samples=len(request.batches()),
            sequential_targets=parts(model) if request.options.get("parts") else None,
        )
    request.facts["bits_per_weight"] = bits_per_weight(
        request.bits, request.group_size, 0 if request.symmetric else request.bits
    )
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            module.weight.data = forward_quantize(module, module.weight.data, "weight", scheme.weights)
    return original.changes(model)


def parts(model: Any) -> list[str]:
    """The classes of the modules inside blocks that hold linears, attention and MLP for instance."""
    linears = [name for name in Original(model).linears if ".layers.0." in name]
    return sorted({type(model.get_submodule(name.rsplit(".", 2)[0])).__name__ for name in linears})


def recipe(request: Request) -> list[Any]:
    """The modifiers asked for; the last one quantizes."""
    options = request.options
    arguments = QuantizationArgs(
        num_bits=request.bits,
        symmetric=request.symmetric,
        strategy="group",
        group_size=request.group_size,
        **options.get("weights", {}),
    )
    quantizing: dict[str, Any] = {
        "config_groups": {"all": QuantizationScheme(targets=["Linear"], weights=arguments)},
        "ignore": ["lm_head"],
    }
    modifiers: list[Any] = []
    if "awq" in options["recipe"]:
        modifiers.append(AWQModifier(**options.get("awq", {})))
    if "gptq" in options["recipe"]:
        return [*modifiers, GPTQModifier(**quantizing, **options.get("gptq", {}))]
    return [*modifiers, QuantizationModifier(**quantizing)]


if __name__ == "__main__":
    answer("llmcompressor", quantize)
