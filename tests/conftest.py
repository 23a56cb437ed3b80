"""What all tests share: no hub, and hypothesis without time limits, since machines differ."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported

from hypothesis import settings

settings.register_profile("bakron", deadline=None, print_blob=True)
settings.load_profile("bakron")
