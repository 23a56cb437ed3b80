"""Decoder language models, loaded and replayed block by block: the only package that knows transformers."""

from __future__ import annotations

from bakron.models.decoder import Decoder
from bakron.models.load import load_decoder

__all__ = ["Decoder", "load_decoder"]
