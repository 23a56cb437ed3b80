"""Loading a decoder from a Hugging Face checkpoint, silently, and refusing what cannot be quantized."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bakron.errors import ModelError, NonFiniteError
from bakron.models.checkpoint import first_line, locate, read_config, tensor_shapes
from bakron.models.decoder import Decoder
from bakron.models.decompress import dense_state_dict
from bakron.models.families import CAUSAL_CLASS_ENDINGS


def load_decoder(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Decoder:
    """Load a causal decoder for calibration and evaluation.

    path: directory of a checkpoint (config.json and safetensors), or the name of one on the hub.
    dtype: of computation; weights are cast to it.  A compressed-tensors checkpoint comes back dense, every
    weight equal to scale * (q - z) taken in the checkpoint's own dtype, then cast.
    Raises ModelError (no such model, not a causal decoder, weights missing, structure not supported),
    NonFiniteError (a weight holds NaN or infinity).  Warns of tensors that the model has no place for.
    """
    directory = locate(path)
    raw = read_config(directory)
    shapes = tensor_shapes(directory)
    quantization = raw.get("quantization_config")
    with quiet():
        model_class, config = _model_class(directory, raw)
        if quantization is None:
            source: dict[str, Any] = {"pretrained_model_name_or_path": directory, "local_files_only": True}
        else:
            del config.quantization_config
            source = {
                "pretrained_model_name_or_path": None,
                "state_dict": dense_state_dict(directory, quantization),
            }
        model, unused = _from_pretrained(directory, model_class, config, dtype, source)
    if unused:
        warnings.warn(
            f"{directory}: {model_class.__name__} has no place for these tensors: {listing(unused)}.",
            stacklevel=2,
        )
    require_finite(model)
    model.to(device)  # pyright: ignore[reportArgumentType]
    return Decoder(model, path=directory, shapes=shapes if quantization is None else None)


def _model_class(directory: Path, raw: dict[str, Any]) -> tuple[Any, Any]:
    """The transformers class of the causal language model, and its configuration. Raises ModelError."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    advice = "bakron quantizes causal decoders (Llama, Mistral, Qwen, Gemma, Phi-3, GPT-2 and their like)."
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise ModelError(
            f"{directory / 'config.json'}: transformers does not know this model, model_type "
            f"{raw.get('model_type')!r} ({first_line(error)}). Update transformers, or check the file. "
            f"{advice}"
        ) from error
    listed = raw.get("architectures") or []
    causal = not listed or any(name.endswith(CAUSAL_CLASS_ENDINGS) for name in listed)
    if (
        getattr(config, "is_encoder_decoder", False)
        or not causal
        or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        raise ModelError(
            f"{directory}: expected a causal language model, seen "
            f"{', '.join(listed) or raw.get('model_type')}. {advice}"
        )
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return (found[0] if isinstance(found, (tuple, list)) else found), config


def _from_pretrained(
    directory: Path, model_class: Any, config: Any, dtype: torch.dtype, source: dict[str, Any]
) -> tuple[nn.Module, list[str]]:
    """The model, and the checkpoint's tensors that it does not use.

    Attention is transformers' own choice: sdpa, or eager where that cannot do it (Gemma 2's soft cap).
    """
    try:
        model, info = model_class.from_pretrained(
            **source, config=config, dtype=dtype, output_loading_info=True, attn_implementation=None
        )
    except Exception as error:
        raise ModelError(
            f"{directory}: transformers cannot load it as {model_class.__name__} ({type(error).__name__}: "
            f"{error}). Check that config.json belongs to these weights."
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{directory}: weights of {model_class.__name__} are not in the checkpoint: {listing(missing)}. "
            "Fetch the missing shards, or check that config.json belongs to these weights."
        )
    return model, sorted(info["unexpected_keys"])


def listing(names: list[str], most: int = 8) -> str:
    """The names in one line, cut after ``most`` of them."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def require_finite(model: nn.Module) -> None:
    """Raises NonFiniteError naming the parameters that hold NaN or infinity."""
    bad = [name for name, parameter in model.named_parameters() if not bool(torch.isfinite(parameter).all())]
    if bad:
        raise NonFiniteError(
            f"{listing(bad)}: the weights hold NaN or infinity. The checkpoint is damaged, "
            "or its values overflow the compute dtype; load it in float32 or fetch it again."
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Within, transformers shows neither progress bars nor warnings: what matters is raised as an error."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
