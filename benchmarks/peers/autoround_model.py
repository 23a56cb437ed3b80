"""AutoRound on a whole model, its weights in memory after ``quantize``.

Options are those of its ``AutoRound``.
"""

from __future__ import annotations

from auto_round import AutoRound
from torch import Tensor
from transformers import AutoTokenizer
from whole import Original, Request, answer, bits_per_weight, load_model


def quantize(request: Request) -> dict[str, Tensor]:
    """The linears as it rounds and clips them, float32 but for its scales, which it keeps in float16."""
    model, batches = load_model(request.model), request.batches()
    original = Original(model)
    tuner = AutoRound(
        model,
        AutoTokenizer.from_pretrained(request.model, local_files_only=True),
        bits=request.bits,
        group_size=request.group_size,
        sym=request.symmetric,
        dataset=batches,
        nsamples=len(batches),
        seqlen=batches[0]["input_ids"].shape[1],  # it passes over shorter ones
        seed=request.seed,
        device_map="cpu",
        batch_size=min(8, len(batches)),
        amp=False,  # float32 arithmetic, as everywhere here
        enable_torch_compile=False,
        **request.options,
    )
    with request.measured():
        quantized, _ = tuner.quantize()
    request.facts["bits_per_weight"] = bits_per_weight(
        request.bits, request.group_size, 0 if request.symmetric else request.bits
    )
    return original.changes(quantized)


if __name__ == "__main__":
    answer("auto-round", quantize)
