"""What transforms do to the weights of a model: relative error of rounding them to nearest, by kind of linear.

Run: python benchmarks/transforms.py MODEL [--bits 3] [--group-size 64] [--scale mse]
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch

from bakron.models import load_decoder, transform
from bakron.quantizers.integer import Integer

VARIANTS = ("", "fold", "rotate", "heads", "rescale", "rotate+heads", "rotate+heads+rescale")


def relative_errors(path: str, names: list[str], quantizer: Integer) -> dict[str, float]:
    """Kind of linear → ‖Ŵ − W‖_F/‖W‖_F, root mean square over the blocks, of the model at ``path`` after ``names``."""
    decoder = transform(load_decoder(path), names)
    squares: dict[str, list[float]] = defaultdict(list)
    for spec in (spec for specs in decoder.linears for spec in specs):
        W = decoder.get_weight(spec.name)
        grid = quantizer.fit(W)
        squares[spec.name.rpartition(".")[2]].append(
            float((grid.values(grid.nearest(W)) - W).norm() / W.norm()) ** 2
        )
    means = {kind: torch.tensor(values).mean().sqrt().item() for kind, values in squares.items()}
    return {**means, "all": torch.tensor(sum(squares.values(), [])).mean().sqrt().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--scale", default="mse")
    args = parser.parse_args()
    quantizer = Integer(args.bits, args.group_size, True, args.scale)
    for variant in VARIANTS:
        errors = relative_errors(args.model, variant.split("+") if variant else [], quantizer)
        if not variant:
            print("| transform |", " | ".join(errors), "|\n|---|" + "---|" * len(errors))
        print(
            f"| {variant or 'none'} |",
            " | ".join(f"{error:.4f}" for error in errors.values()),
            "|",
            flush=True,
        )


if __name__ == "__main__":
    main()
