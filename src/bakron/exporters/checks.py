"""The last look at a solved layer and at every tensor before it is written."""

from __future__ import annotations

import torch
from torch import Tensor

from bakron.core.layers import Scheme, SolvedLayer
from bakron.errors import FormatError, NonFiniteError


def check_layer(
    layer: SolvedLayer, key: str, stored: tuple[int, ...], scheme: Scheme, dtype: torch.dtype
) -> None:
    """Raise FormatError for a layer that is not what was asked for: tensor, scheme, sizes, scale dtype, code range.

    key, stored: name and shape of the weight in the source.  dtype: what the scales must have.
    Raises NonFiniteError when a scale or a dequantized value is NaN or infinite.
    """
    spec = layer.spec
    shape = (spec.d_out, spec.d_in)
    n_groups = 1 if scheme.group_size == -1 else -(-spec.d_in // scheme.group_size)
    limit = 1 << (scheme.bits - 1)
    claims = [
        ("tensor", key, spec.tensor_key),
        ("scheme", scheme, layer.scheme),
        ("stored shape", stored, shape[::-1] if spec.transposed else shape),
        ("codes' shape", shape, tuple(layer.codes.shape)),
        ("scale's shape", (spec.d_out, n_groups), tuple(layer.scale.shape)),
        ("zero's shape", (spec.d_out, n_groups), tuple(layer.zero.shape)),
        ("scale's dtype (the model's)", dtype, layer.scale.dtype),
    ]
    for what, expected, seen in claims:
        if expected != seen:
            raise FormatError(f"{spec.name}: {what}: expected {expected}, seen {seen}; solve the layer again")
    check_finite(f"{spec.name}: scale", layer.scale, "the solved layer")
    for what, codes in (("codes", layer.codes), ("zero", layer.zero)):
        low, high = int(codes.min()), int(codes.max())
        bounds = (0, 0) if what == "zero" and scheme.symmetric else (-limit, limit - 1)
        if low < bounds[0] or high > bounds[1]:
            raise FormatError(
                f"{spec.name}: {what}: expected {bounds[0]} to {bounds[1]}, seen {low} to {high}"
            )
    check_finite(f"{spec.name}: scale * (codes - zero)", layer.weight(), "the solved layer")


def check_finite(name: str, tensor: Tensor, origin: str) -> None:
    """Raise NonFiniteError, naming the tensor and where it comes from, when a value is NaN or infinite."""
    if not tensor.is_floating_point():
        return
    finite = torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor)
    if not finite.all():
        bad = int(finite.numel() - finite.sum())
        raise NonFiniteError(
            f"{name}: {bad} of {tensor.numel()} values are NaN or infinite in {origin}; not written"
        )
