"""The dense format: the dequantized weights under the source's names, an ordinary checkpoint for any loader."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from bakron.core.layers import LinearSpec, Scheme, SolvedLayer
from bakron.errors import FormatError


class DenseExporter:
    """Writes quantized values as ordinary weights: no smaller, loads everywhere, holds every layer."""

    name = "dense"

    def check(self, layers: Mapping[Scheme, Sequence[LinearSpec]]) -> None:
        """Raise FormatError that lists every layer whose rows the groups do not divide."""
        faults = [
            f"  {layer.name} ({layer.d_out} x {layer.d_in}): group_size {group} does not divide d_in {layer.d_in}"
            for group, layer in ((scheme.group_size, layer) for scheme in layers for layer in layers[scheme])
            if group != -1 and (group < 1 or layer.d_in % group)
        ]
        if faults:
            fix = "choose a group_size that divides it, or -1 for the whole row, or skip the layer"
            raise FormatError("\n".join(["dense cannot store this:", *faults, fix]))

    def stored_bytes(self, d_out: int, d_in: int, scheme: Scheme, dtype: torch.dtype) -> int:
        """The bytes of a (d_out, d_in) weight of this dtype."""
        return d_out * d_in * dtype.itemsize

    def tensors(self, layer: SolvedLayer) -> dict[str, Tensor]:
        """The dequantized weight in the scale's dtype, which is the model's, and in the source's orientation."""
        weight = layer.weight()
        return {layer.spec.tensor_key: (weight.T if layer.spec.transposed else weight).contiguous()}

    def quantization_config(self, layers: Mapping[Scheme, Sequence[str]], ignore: Sequence[str]) -> None:
        """None: nothing in config.json changes."""

    def usage(self, schemes: Collection[Scheme]) -> str:
        """Python lines that load the checkpoint at ``path`` with transformers."""
        return (
            "from transformers import AutoModelForCausalLM\n"
            'model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")'
        )


EXPORTER = DenseExporter()
