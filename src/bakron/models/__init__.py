"""Decoder language models, loaded and replayed block by block: the only package that knows transformers."""

from __future__ import annotations

from bakron.models.decoder import Decoder
from bakron.models.load import load_decoder
from bakron.models.transforms import transform
from bakron.models.view import Viewer, check_views

__all__ = ["Decoder", "Viewer", "check_views", "load_decoder", "transform"]
