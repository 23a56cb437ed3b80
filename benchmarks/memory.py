"""Peak memory of a whole run against what its plan said, measured in a process of its own.

python benchmarks/memory.py demo/smollm2 demo/wikipedia/calibration.jsonl --n-sequences 16 --sequence-length 512
python benchmarks/memory.py --random-llama 24 1024 --n-sequences 1 --sequence-length 64 --offload disk
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import bakron
from bakron.core.refine import refined
from bakron.kernels import get_panel_kernel
from bakron.run.plan import Plan


def _libraries(model: str) -> None:
    """Load all code that a run uses, and compile what it compiles: that is not the run's own memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    import bakron.models.offload
    import bakron.run.pipeline  # noqa: F401

    if Path(model, "tokenizer.json").exists():
        AutoTokenizer.from_pretrained(model)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    solution = bakron.solve(torch.randn(4, 4), torch.eye(4), torch.eye(4))
    refined(solution, 1, get_panel_kernel(torch.device("cpu")))


def _random_llama(folder: Path, n_blocks: int, width: int) -> None:
    """Save a random Llama in bfloat16 with a small vocabulary, and token ids to calibrate it with."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=n_blocks,
        num_attention_heads=width // 64, num_key_value_heads=width // 256, dtype=torch.bfloat16,
    )  # fmt: skip
    LlamaForCausalLM._from_config(config).save_pretrained(folder)
    save_file({"input_ids": torch.randint(1024, (64, 512))}, folder / "ids.safetensors")


def _run(arguments: argparse.Namespace, out: str, answers: multiprocessing.Queue) -> None:
    _libraries(arguments.model)
    started = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plans: list[Plan] = []
    bakron.quantize(
        arguments.model,
        out,
        bits=arguments.bits,
        method=arguments.method,
        calibration=arguments.calibration,
        n_sequences=arguments.n_sequences,
        sequence_length=arguments.sequence_length,
        offload=arguments.offload,
        on_plan=plans.append,
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answers.put((before * 1024, peak * 1024, plans[0], time.perf_counter() - started))


def main() -> None:
    """Run once and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("calibration", nargs="?")
    parser.add_argument(
        "--random-llama", type=int, nargs=2, metavar=("BLOCKS", "WIDTH"), help="instead of a model"
    )
    parser.add_argument("--offload", choices=["none", "disk"], default="none")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--method", default="bakron")
    parser.add_argument("--n-sequences", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=512)
    arguments = parser.parse_args()
    if (arguments.calibration is None) == (arguments.random_llama is None):
        parser.error("expected a model and calibration text, or --random-llama")
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.random_llama:
            arguments.model, arguments.calibration = f"{folder}/model", f"{folder}/model/ids.safetensors"
            _random_llama(Path(arguments.model), *arguments.random_llama)
        process = context.Process(target=_run, args=(arguments, str(Path(folder) / "out"), answers))
        process.start()
        libraries, peak, plan, seconds = answers.get()
        process.join()
    for name, value in (
        ("plan: model", plan.model),
        ("plan: factors of one block", plan.factors),
        ("plan: boundary states", plan.boundaries),
        ("plan: activations of one sequence", plan.activations),
        ("plan: all", plan.memory),
        ("libraries, before the run", libraries),
        ("measured peak, libraries taken off", peak - libraries),
    ):
        print(f"{name:36} {value / 1e9:6.2f} GB")
    print(f"{'seconds':36} {seconds:6.1f}")


if __name__ == "__main__":
    main()
