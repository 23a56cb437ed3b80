"""Loading a decoder from a Hugging Face checkpoint, silently, and refusing what cannot be quantized."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from bakron.errors import MissingExtraError, ModelError
from bakron.models.checkpoint import first_line, listing, locate, read_config, require_finite, tensor_shapes
from bakron.models.decoder import Decoder
from bakron.models.decompress import dense_tensors, write_dense
from bakron.models.families import CAUSAL_CLASS_ENDINGS
from bakron.models.memory import parameter_bytes, require_memory


def load_decoder(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    offload: Literal["none", "disk"] = "none",
) -> Decoder:
    """Load a causal decoder for calibration and evaluation.

    path: directory of a checkpoint (config.json and safetensors), or the name of one on the hub.
    dtype: of computation; weights are cast to it.  A compressed-tensors checkpoint comes back dense, every
    weight equal to scale * (q - z) taken in the checkpoint's own dtype, then cast.
    offload: "disk" leaves the parameters of blocks in the files and has one block at a time in memory; those of a
    compressed-tensors checkpoint are written to a temporary directory for that, dense.
    Raises ModelError (no such model, not a causal decoder, weights missing, structure not supported), MemorySpaceError,
    NonFiniteError (a weight holds NaN or infinity), MissingExtraError.  Warns of tensors that the model has no place for.
    """
    directory, device = locate(path), torch.device(device)
    raw = read_config(directory)
    shapes = tensor_shapes(directory)
    quantization = raw.get("quantization_config")
    with quiet():
        model_class, config = _model_class(directory, raw)
        if quantization is not None:
            del config.quantization_config
        skeleton = _skeleton(directory, model_class, config)
        if offload == "disk":
            unpacked = _unpacked(directory, quantization)
            places = _offload().device_map(skeleton, device)
            source = {**_source(Path(unpacked.name) if unpacked else directory), "device_map": places}
            model, unused = _from_pretrained(directory, model_class, config, dtype, source)
            blocks = _offload().OffloadedBlocks(model, device, unpacked)
        else:
            for place in {torch.device("cpu"), device}:
                require_memory(directory, parameter_bytes(skeleton, dtype), place)
            source = _source(directory, quantization)
            model, unused = _from_pretrained(directory, model_class, config, dtype, source)
            model.to(device)  # pyright: ignore[reportArgumentType]
            blocks = None
    if unused:
        warnings.warn(
            f"{directory}: {model_class.__name__} has no place for these tensors: {listing(unused)}.",
            stacklevel=2,
        )
    require_finite({name: p for name, p in model.named_parameters() if not p.is_meta})
    return Decoder(model, path=directory, shapes=shapes if quantization is None else None, offloaded=blocks)


def _source(directory: Path, quantization: dict[str, Any] | None = None) -> dict[str, Any]:
    """Where transformers takes the tensors from."""
    if quantization is None:
        return {"pretrained_model_name_or_path": directory, "local_files_only": True}
    return {
        "pretrained_model_name_or_path": None,
        "state_dict": dict(dense_tensors(directory, quantization)),
    }


def _unpacked(directory: Path, quantization: dict[str, Any] | None) -> TemporaryDirectory[str] | None:
    """A dense copy of a quantized checkpoint, which lasts as long as the object; None when it is dense itself."""
    if quantization is None:
        return None
    folder = TemporaryDirectory(prefix="bakron-")
    write_dense(directory, quantization, Path(folder.name))
    return folder


def _offload() -> ModuleType:
    """The module that needs accelerate. Raises MissingExtraError."""
    try:
        import bakron.models.offload as offload
    except ImportError as error:
        raise MissingExtraError(
            'offload: disk needs accelerate, which knows where each weight is: pip install "bakron[offload]"'
        ) from error
    return offload


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


def _skeleton(directory: Path, model_class: Any, config: Any) -> nn.Module:
    """The model on the meta device, without any weights."""
    with _named(directory, model_class), torch.device("meta"):
        return model_class(copy.deepcopy(config))


def _from_pretrained(
    directory: Path, model_class: Any, config: Any, dtype: torch.dtype, source: dict[str, Any]
) -> tuple[nn.Module, list[str]]:
    """The model, and the checkpoint's tensors that it does not use.

    Attention is transformers' own choice: sdpa, or eager where that cannot do it (Gemma 2's soft cap).
    """
    with _named(directory, model_class):
        model, info = model_class.from_pretrained(
            **source, config=config, dtype=dtype, output_loading_info=True, attn_implementation=None
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{directory}: weights of {model_class.__name__} are not in the checkpoint: {listing(missing)}. "
            "Fetch the missing shards, or check that config.json belongs to these weights."
        )
    return model, sorted(info["unexpected_keys"])


@contextmanager
def _named(directory: Path, model_class: Any) -> Iterator[None]:
    """Within, whatever transformers raises becomes a ModelError that names the directory."""
    try:
        yield
    except Exception as error:
        raise ModelError(
            f"{directory}: transformers cannot load it as {model_class.__name__} ({type(error).__name__}: "
            f"{error}). Check that config.json belongs to these weights."
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Within, transformers shows neither progress bars nor warnings: what matters is raised as an error."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    accelerate = getLogger("accelerate")
    level = accelerate.level
    accelerate.setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        accelerate.setLevel(level)
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
