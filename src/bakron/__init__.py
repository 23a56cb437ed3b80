"""bakron: post-training quantization with two-sided, Kronecker-factored Hessians (BaKron, arXiv 2608.06291)."""

from bakron.api import solve
from bakron.quantizers.integer import Integer

__all__ = ["Integer", "solve"]
