"""Block formats of llama.cpp: Q4_0 … Q8_0, and the K-quants with scales on a lattice of two levels."""

from bakron.quantizers.gguf.fit import Gguf
from bakron.quantizers.gguf.kinds import KINDS, GgufGrid
from bakron.quantizers.gguf.packing import pack

QUANTIZER = Gguf

__all__ = ["KINDS", "QUANTIZER", "Gguf", "GgufGrid", "pack"]
