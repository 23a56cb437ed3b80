"""What the scripts that quantize a whole model share: the request comes as a JSON file, weights and facts go out.

Argument: the request's path. It holds ``model`` (directory), ``ids`` (safetensors with ``input_ids`` (N, T), or null),
``bits``, ``group_size``, ``symmetric``, ``seed``, ``threads``, ``options`` (of the script's own), and ``out``, the
directory in which ``weights.safetensors`` and ``result.json`` are left.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass
class Request:
    """What is asked for; ``facts`` is what the answer will say besides the weights."""

    model: str
    ids: Tensor | None
    bits: int
    group_size: int
    symmetric: bool
    seed: int
    threads: int
    options: dict[str, Any]
    out: Path
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> Request:
        """The request of this file, its token ids loaded."""
        values = json.loads(Path(path).read_text())
        ids = load_file(values["ids"])["input_ids"] if values["ids"] else None
        return cls(**{**values, "ids": ids, "out": Path(values["out"])})

    def batches(self) -> list[dict[str, Tensor]]:
        """A batch of one sequence for each, (1, T), without pads."""
        assert self.ids is not None
        return [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in self.ids]

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Within is what counts as quantizing: its seconds, and the peak of the process up to its end."""
        gc.collect()
        started = time.perf_counter()
        yield
        self.facts["seconds"] = time.perf_counter() - started
        self.facts["peak_rss"] = peak_rss()


def peak_rss() -> int:
    """The largest resident size of this process so far, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def bits_per_weight(bits: float, group_size: int, zero_bits: int, scale_bits: int = 16) -> float:
    """Bits of a code, with its share of the group's scale and zero point."""
    return bits + (scale_bits + zero_bits) / group_size


def load_model(path: str) -> Any:
    """The transformers model in float32, on the CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


class Original:
    """A model's parameters before it is quantized, and which of them are of linears inside its blocks."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.linears = {
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and ".layers." in name
        }

    def changes(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """All these linears, and whatever else is not what it was, norms for instance."""
        return {
            name: value
            for name, value in model.named_parameters()
            if name in self.linears
            or (name in self.parameters and not torch.equal(value, self.parameters[name]))
        }


def answer(package: str, quantize: Callable[[Request], dict[str, Tensor]]) -> None:
    """Quantize what the command line's request asks for.

    quantize: returns dense tensors under the model's own names, all that it changed, and sets the facts that only it
    knows: ``bits_per_weight``, and what ``measured`` sets.
    """
    request = Request.read(sys.argv[1])
    torch.set_num_threads(request.threads)
    torch.manual_seed(request.seed)
    weights = {name: tensor.detach().float().contiguous() for name, tensor in quantize(request).items()}
    save_file(weights, request.out / "weights.safetensors")
    facts = {"version": version(package), "torch": torch.__version__, **request.facts}
    (request.out / "result.json").write_text(json.dumps(facts) + "\n")  # last: with it the answer is complete
