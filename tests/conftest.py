"""What all tests share: no hub, hypothesis without time limits, since machines differ, and Triton's interpreter."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

settings.register_profile("bakron", deadline=None, print_blob=True)
settings.load_profile("bakron")
