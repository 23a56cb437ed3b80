"""What the parts of bakron tell each other about one linear layer: plain data, no model and no file."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearSpec:
    """One quantizable linear layer of a model.

    name: module path inside the model, e.g. ``model.layers.0.self_attn.q_proj``.
    tensor_key: name of its weight in the source checkpoint, e.g. ``model.layers.0.self_attn.q_proj.weight``.
    block: index of its decoder block.  d_out, d_in: sizes of y = W x, W being (d_out, d_in).
    transposed: the stored weight is (d_in, d_out) (GPT-2's ``Conv1D``).
    """

    name: str
    tensor_key: str
    block: int
    d_out: int
    d_in: int
    transposed: bool = False


@dataclass(frozen=True, order=True)
class Scheme:
    """How weights are stored: bits (2..8), group_size (-1 = whole row), symmetric or with integer zeros."""

    bits: int
    group_size: int
    symmetric: bool

    def n_groups(self, d_in: int) -> int:
        """The groups of a row of ``d_in`` weights; the last may be short."""
        return 1 if self.group_size == -1 else -(-d_in // self.group_size)

    def __str__(self) -> str:
        """For messages: ``3 bit, group 64``."""
        group = "whole row" if self.group_size == -1 else f"group {self.group_size}"
        return f"{self.bits} bit, {group}" + ("" if self.symmetric else ", asymmetric")


@dataclass(frozen=True)
class SolvedLayer:
    """A quantized weight in the grid of its scheme.

    codes: (d_out, d_in) int8/int16, signed, in [-2^(bits-1), 2^(bits-1) - 1], original column order.
    scale: (d_out, n_groups) in the on-disk dtype.  zero: (d_out, n_groups) int, same signed range; 0 when symmetric.
    Column j belongs to group j // group_size.  The weight is scale * (codes - zero).
    """

    spec: LinearSpec
    scheme: Scheme
    codes: Tensor
    scale: Tensor
    zero: Tensor

    def weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dequantized (d_out, d_in) weight: the product taken in the scale's dtype, as loaders do, then cast."""
        group = self.spec.d_in if self.scheme.group_size == -1 else self.scheme.group_size
        column = torch.arange(self.spec.d_in) // group
        steps = (self.codes.to(torch.int32) - self.zero.to(torch.int32)[:, column]).to(self.scale.dtype)
        value = steps * self.scale[:, column]
        return value if dtype is None else value.to(dtype)
