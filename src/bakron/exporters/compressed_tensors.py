"""The compressed-tensors format ``pack-quantized``, read by vLLM, SGLang and transformers: the default export.

Per linear of O outputs and I inputs, b bits, groups of g inputs (value = (code - zero) * scale):
``weight_packed`` int32 (O, ceil(I*b/32)), ``weight_scale`` (O, I/g), ``weight_shape`` int64 (2,), and for asymmetric
schemes ``weight_zero_point`` int32 (ceil(O*b/32), I/g), packed along the outputs.

config.json has a group of settings for each scheme. One scheme targets the class ``Linear``; several target names of
modules, each exactly: engines look up a fused layer's class before its parts, so that ``Linear`` would catch all of
them, and match regular expressions at the start of a name only, so that one for block 1 would catch block 10.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bakron.core.layers import LinearSpec, Scheme, SolvedLayer
from bakron.errors import FormatError
from bakron.exporters.packing import n_words, pack_signed, unpack_signed

SUFFIXES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")


class CompressedTensorsExporter:
    """Writes the ``pack-quantized`` layout of 2 to 8 bits, symmetric or asymmetric, by group or by row."""

    name = "compressed_tensors"

    def check(self, layers: Mapping[Scheme, Sequence[LinearSpec]]) -> None:
        """Raise FormatError that lists every layer and setting which this format cannot hold.

        Several schemes must all be symmetric: transformers resolves zero points while loading, and takes those of the
        first scheme for all layers then.
        """
        faults = [fault for scheme in layers for fault in _faults(layers[scheme], scheme)]
        if len(layers) > 1 and not all(scheme.symmetric for scheme in layers):
            listed = "; ".join(str(scheme) for scheme in sorted(layers))
            faults.append(
                f"zero points beside another scheme ({listed}): transformers would read them all in one; "
                "make every layer symmetric, or choose one scheme, or the format 'dense'"
            )
        if faults:
            raise FormatError(
                "compressed_tensors cannot store this:\n" + "\n".join(f"  {fault}" for fault in faults)
            )

    def stored_bytes(self, d_out: int, d_in: int, scheme: Scheme, dtype: torch.dtype) -> int:
        """The bytes of all tensors of one (d_out, d_in) layer; dtype: that of the scales."""
        n_groups = 1 if scheme.group_size == -1 else d_in // scheme.group_size
        zeros = 0 if scheme.symmetric else 4 * n_words(d_out, scheme.bits) * n_groups
        return 4 * d_out * n_words(d_in, scheme.bits) + d_out * n_groups * dtype.itemsize + zeros + 16

    def tensors(self, layer: SolvedLayer) -> dict[str, Tensor]:
        """The packed tensors of the layer, by full name. Raises FormatError when a code is out of range."""
        base = layer.spec.tensor_key.removesuffix("weight")
        bits = layer.scheme.bits
        tensors = {
            f"{base}weight_packed": pack_signed(layer.codes, bits),
            f"{base}weight_scale": layer.scale.contiguous(),
            f"{base}weight_shape": torch.tensor([layer.spec.d_out, layer.spec.d_in], dtype=torch.int64),
        }
        if not layer.scheme.symmetric:
            tensors[f"{base}weight_zero_point"] = pack_signed(layer.zero.T, bits).T.contiguous()
        return tensors

    def quantization_config(
        self, layers: Mapping[Scheme, Sequence[str]], ignore: Sequence[str]
    ) -> dict[str, Any]:
        """The block for config.json; ignore: every module that is linear and was not quantized."""
        targets = {
            scheme: ["Linear"] if len(layers) == 1 else sorted(layers[scheme]) for scheme in sorted(layers)
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": list(ignore),
            "config_groups": {
                f"group_{i}": _config_group(scheme, targets[scheme]) for i, scheme in enumerate(targets)
            },
        }

    def usage(self, schemes: Collection[Scheme]) -> str:
        """Python lines that load the checkpoint at ``path`` with transformers."""
        if all(scheme.symmetric for scheme in schemes):
            return (
                "from transformers import AutoModelForCausalLM  # needs the package compressed-tensors\n"
                'model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")'
            )
        return (
            "from transformers import AutoModelForCausalLM, CompressedTensorsConfig\n"
            "config = CompressedTensorsConfig(dequantize=True)  # zero points need it\n"
            'model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", quantization_config=config)'
        )


def _faults(layers: Sequence[LinearSpec], scheme: Scheme) -> list[str]:
    """What is wrong with storing ``layers`` in ``scheme``, and what to change."""
    faults = []
    if not 2 <= scheme.bits <= 8:
        faults.append(f"bits = {scheme.bits}: expected 2 to 8; change bits")
    group = scheme.group_size
    if group != -1 and group < 1:
        faults.append(f"group_size = {group}: expected a positive number, or -1 for the whole row")
    for layer in layers:
        where = f"{layer.name} ({layer.d_out} x {layer.d_in})"
        if layer.transposed:
            faults.append(f"{where}: stored as (d_in, d_out), which only the format 'dense' can hold")
        if not layer.tensor_key.endswith(".weight"):
            faults.append(
                f"{where}: its tensor {layer.tensor_key!r} does not end in '.weight'; skip the layer"
            )
        if group > 0 and layer.d_in % group:
            fix = "choose a group_size that divides it, or -1, or skip the layer"
            faults.append(f"{where}: group_size {group} does not divide d_in {layer.d_in}; {fix}")
    return faults


def _config_group(scheme: Scheme, targets: Sequence[str]) -> dict[str, Any]:
    """One entry of ``config_groups``."""
    by_row = scheme.group_size == -1
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if by_row else "group",
        "group_size": None if by_row else scheme.group_size,
        "dynamic": False,
    }
    return {
        "targets": list(targets),
        "format": "pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "weights": weights,
    }


def dequantize(tensors: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """The (d_out, d_in) weight, in the scale's dtype, from one layer's tensors named by SUFFIXES."""
    d_out, d_in = (int(size) for size in tensors["weight_shape"])
    scale = tensors["weight_scale"]
    group = d_in if scheme.group_size == -1 else scheme.group_size
    steps = unpack_signed(tensors["weight_packed"], scheme.bits, d_in).to(scale.dtype)
    if not scheme.symmetric:
        zero = unpack_signed(tensors["weight_zero_point"].T, scheme.bits, d_out).T
        steps = steps - zero.to(scale.dtype).repeat_interleave(group, dim=1)
    return steps * scale.repeat_interleave(group, dim=1)


EXPORTER = CompressedTensorsExporter()
