"""bakron: post-training quantization with two-sided, Kronecker-factored Hessians (BaKron, arXiv 2608.06291).

Names are imported when they are first used, so that ``import bakron`` and ``bakron --help`` stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bakron.api import solve
    from bakron.quantizers.e8 import E8
    from bakron.quantizers.float4 import Float4
    from bakron.quantizers.gguf import Gguf
    from bakron.quantizers.integer import Integer
    from bakron.quantizers.nf4 import NF4
    from bakron.quantizers.ternary import Ternary
    from bakron.run.allocate import plan
    from bakron.run.compare import compare
    from bakron.run.pipeline import quantize
    from bakron.run.settings import Settings
    from bakron.run.verify import verify

    __version__: str

__all__ = [
    "E8",
    "NF4",
    "Float4",
    "Gguf",
    "Integer",
    "Settings",
    "Ternary",
    "compare",
    "plan",
    "quantize",
    "solve",
    "verify",
]

_HOME = {
    "E8": "bakron.quantizers.e8",
    "Float4": "bakron.quantizers.float4",
    "Gguf": "bakron.quantizers.gguf",
    "Integer": "bakron.quantizers.integer",
    "NF4": "bakron.quantizers.nf4",
    "Settings": "bakron.run.settings",
    "Ternary": "bakron.quantizers.ternary",
    "compare": "bakron.run.compare",
    "plan": "bakron.run.allocate",
    "quantize": "bakron.run.pipeline",
    "solve": "bakron.api",
    "verify": "bakron.run.verify",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("bakron")
    if name not in _HOME:
        raise AttributeError(f"module 'bakron' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
