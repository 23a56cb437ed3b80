"""Tiny random decoders of every supported family, and a tiny tokenizer, saved as Hugging Face checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "gpt2")
TINY_VOCAB = 272
BOS, EOS = 0, 1

_COMMON: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "attention_dropout": 0.0,
}
_ALTERNATE = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {**_ALTERNATE, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3", {**_ALTERNATE, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3", {}),
    "gpt2": ("GPT2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def tiny_config(family: str, *, tied: bool | None = None, **overrides: Any) -> Any:
    """The configuration of a tiny model of ``family``; overrides use Llama's field names."""
    prefix, extra = _FAMILY[family]
    fields = {**_COMMON, **extra, **overrides}
    if family == "gpt2":
        fields = {_GPT2_NAMES.get(key, key): value for key, value in fields.items()}
        for unused in ("head_dim", "num_key_value_heads", "attention_dropout"):
            fields.pop(unused, None)
    if tied is not None:
        fields["tie_word_embeddings"] = tied
    return getattr(transformers, f"{prefix}TextConfig" if family == "gemma3" else f"{prefix}Config")(**fields)


def tiny_model(family: str, *, tied: bool | None = None, seed: int = 0, **overrides: Any) -> Any:
    """A tiny float32 model in memory, norms and biases random too."""
    config = tiny_config(family, tied=tied, **overrides)
    prefix = _FAMILY[family][0]
    model_class = getattr(
        transformers, f"{prefix}LMHeadModel" if family == "gpt2" else f"{prefix}ForCausalLM"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tiny_decoder(
    family: str,
    path: str | Path,
    *,
    tied: bool | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Save a tiny random model (2 blocks of width 32, vocabulary 272, 128 positions) to a directory.

    tied: of head and embedding; None is the family's own default.  dtype: of the stored tensors.
    overrides: configuration fields under Llama's names; save_pretrained's ``max_shard_size`` is one too.
    """
    shard = overrides.pop("max_shard_size", "1GB")
    transformers.utils.logging.disable_progress_bar()
    tiny_model(family, tied=tied, seed=seed, **overrides).to(dtype).save_pretrained(
        path, max_shard_size=shard
    )
    if tokenizer:
        tiny_tokenizer(path)
    return Path(path)


def tiny_tokenizer(path: str | Path, *, bos: bool = True) -> Any:
    """Save and return a tokenizer of bytes: ``<s>`` is 0, ``</s>`` is 1, byte tokens follow; 258 in all.

    bos: put ``<s>`` before every text.  It has a small chat template.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<s>", "</s>"])
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    )
    wrapped.save_pretrained(str(path))
    return wrapped
