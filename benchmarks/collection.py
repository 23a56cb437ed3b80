"""Seconds of collecting Hessian factors over seconds of a plain forward and backward of the same tokens, in one run.

    python benchmarks/collection.py demo/smollm2 demo/wikipedia/calibration.jsonl --estimators gram kfac shampoo

The plain step is a training step without optimiser: logits of all tokens at once, their cross-entropy, and the gradients
of all parameters, sequence by sequence, in the same dtype and with the same threads. What is collected is all that a
run collects before it solves, files included: ``--inputs sequential`` needs no H_in of the original model. Steps and
estimators take turns, round after round; ratios are medians (least to most) of the ratios within a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from bakron.models import Decoder
from bakron.run.pipeline import Job
from bakron.run.settings import Settings


def plain_step(decoder: Decoder, sequences: list[Tensor]) -> float:
    """Seconds of a forward and a backward to all parameters."""
    parameters = [p for p in decoder.model.parameters() if p.is_floating_point()]
    for parameter in parameters:
        parameter.requires_grad_()
    started = time.perf_counter()
    for ids in sequences:
        logits = decoder.model(ids[None].to(decoder.device), use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits.float(), ids[1:].to(decoder.device), reduction="sum")
        loss.backward()
    seconds = time.perf_counter() - started
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.grad = None
    return seconds


def collection(job: Job, work: Path) -> float:
    """Seconds of a whole collection, from nothing."""
    again = Job(job.model, job.settings, work, loaded=job.decoder)
    again.collected  # noqa: B018 - hashing the model is not collecting
    started = time.perf_counter()
    again.collect()
    return time.perf_counter() - started


def main() -> None:
    """Print a row for each estimator."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("--estimators", nargs="+", default=["gram", "kfac", "shampoo"])
    parser.add_argument("--inputs", nargs="+", default=["sequential", "static"])
    parser.add_argument("--n-sequences", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    base = Settings(
        calibration=args.calibration,
        n_sequences=args.n_sequences,
        sequence_length=args.sequence_length,
        dtype=args.dtype,
    )
    with tempfile.TemporaryDirectory() as folder:
        plain = Job(args.model, base, Path(folder) / "plain")
        jobs = {
            (estimator, inputs): Job(
                args.model,
                dataclasses.replace(base, estimator=estimator, inputs=inputs),
                Path(folder),
                loaded=plain.decoder,
            )
            for estimator in args.estimators
            for inputs in args.inputs
        }
        steps, seconds = [], {key: [] for key in jobs}
        for turn in range(-1, args.rounds):  # the first one warms up
            step = plain_step(plain.decoder, plain.sequences)
            taken = {
                key: collection(job, Path(folder) / f"{turn}-{'-'.join(key)}") for key, job in jobs.items()
            }
            if turn >= 0:
                steps.append(step)
                for key, value in taken.items():
                    seconds[key].append(value)
    decoder = plain.decoder
    print(
        f"{args.n_sequences} × {args.sequence_length} tokens, {decoder.dtype}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}; plain forward and backward {statistics.median(steps):.2f} s\n"
    )
    print("| estimator | inputs | seconds | / plain forward and backward |")
    print("|---|---|---|---|")
    for (estimator, inputs), values in seconds.items():
        ratios = sorted(value / step for value, step in zip(values, steps, strict=True))
        print(
            f"| {estimator} | {inputs} | {statistics.median(values):.2f} | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f}) |"
        )


if __name__ == "__main__":
    main()
