"""A second opinion on a checkpoint: transformers' own loader and forward, as the model card tells users to load it."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from bakron.errors import MissingExtraError, ModelError
from bakron.models.checkpoint import first_line, listing, locate, read_config
from bakron.models.load import quiet


class Reloaded:
    """The model at ``path`` in its own dtype, after one forward pass, which gave ``logits`` (T, V).

    That pass is what makes packed weights dense: until it has run they are unknown to everybody.
    Raises ModelError (transformers cannot load or run it, or tensors do not match), MissingExtraError.
    """

    def __init__(self, path: str | Path, n_tokens: int = 16) -> None:
        self.path = locate(path)
        quantization = read_config(self.path).get("quantization_config")
        with quiet(), redirect_stderr(io.StringIO()):  # compressed-tensors draws bars of its own
            self.model = _load(self.path, quantization)
            vocabulary = self.model.get_input_embeddings().num_embeddings
            ids = torch.arange(n_tokens) * 7919 % vocabulary
            try:
                with torch.no_grad():
                    self.logits: Tensor = self.model(ids[None], use_cache=False).logits[0]
            except Exception as error:
                raise ModelError(
                    f"{self.path}: transformers loads it, but cannot run it: {_said(error)}."
                ) from error

    def weight(self, name: str) -> Tensor | None:
        """The weight (d_out, d_in) of the linear called ``name``, None when the model has no such thing."""
        try:
            module: Any = self.model.get_submodule(name)
        except AttributeError:
            return None
        weight = getattr(module, "weight", None)
        if weight is None or weight.ndim != 2:
            return None
        return (weight.T if isinstance(module, Conv1D) else weight).detach()


def _load(path: Path, quantization: dict[str, Any] | None) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {}
    if quantization is not None:
        options = _options(path, quantization)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype="auto", local_files_only=True, output_loading_info=True, **options
            )
    except Exception as error:
        raise ModelError(
            f"{path}: transformers cannot load it: {_said(error)}. The export is damaged."
        ) from error
    model, info = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise ModelError(f"{path}: transformers reports {kind}: {listing(sorted(map(str, info[kind])))}.")
    return model.eval()


def _options(path: Path, quantization: dict[str, Any]) -> dict[str, Any]:
    """What a quantized checkpoint needs beside its path: zero points have to be resolved while loading."""
    from transformers import CompressedTensorsConfig

    if find_spec("compressed_tensors") is None:
        raise MissingExtraError(
            f'{path}: loading it needs compressed-tensors: pip install "bakron[compressed-tensors]"'
        )
    groups = quantization.get("config_groups", {}).values()
    if all(group["weights"]["symmetric"] for group in groups):
        return {}
    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
