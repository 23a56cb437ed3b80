"""Peak memory of a whole run against what its plan said, measured in a process of its own.

python benchmarks/memory.py demo/smollm2 demo/wikipedia/calibration.jsonl --n-sequences 16 --sequence-length 512
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
from pathlib import Path

import bakron
from bakron.core.refine import refined
from bakron.kernels import get_panel_kernel
from bakron.run.plan import Plan


def _libraries(model: str) -> None:
    """Load all code that a run uses, and compile what it compiles: that is not the run's own memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    import bakron.run.pipeline  # noqa: F401

    AutoTokenizer.from_pretrained(model)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    solution = bakron.solve(torch.randn(4, 4), torch.eye(4), torch.eye(4))
    refined(solution, 1, get_panel_kernel(torch.device("cpu")))


def _run(arguments: argparse.Namespace, out: str, answers: multiprocessing.Queue) -> None:
    _libraries(arguments.model)
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
        on_plan=plans.append,
    )
    answers.put((before * 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, plans[0]))


def main() -> None:
    """Run once and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--method", default="bakron")
    parser.add_argument("--n-sequences", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=512)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_run, args=(arguments, str(Path(folder) / "out"), answers))
        process.start()
        libraries, peak, plan = answers.get()
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


if __name__ == "__main__":
    main()
