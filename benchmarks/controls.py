"""Negative controls: a directory of Hessian factors with each H_out replaced by one that must be worse.

    bakron collect demo/smollm2 WORK --inputs static --calibration demo/wikipedia/calibration.jsonl
    python benchmarks/controls.py WORK shuffled --kind shuffled
    python benchmarks/accuracy.py … --rows bakron:inputs=static bakron:inputs=static:hessians=shuffled

``shuffled`` permutes rows and columns alike, so that the spectrum stays and says nothing about this layer any more;
``other-block`` takes the H_out of the linear of the same name half the model away.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch
from torch import Tensor

from bakron.core.packed import pack
from bakron.run.factors import Factors
from bakron.run.store import write_tensors

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def shuffled(factors: Factors, name: str) -> Tensor | None:
    """H_out (m, m) of ``name`` with its rows and columns in one random order."""
    H = factors.load(name, "H_out")
    if H is None:
        return None
    order = torch.randperm(len(H), generator=torch.Generator().manual_seed(len(H)))
    return H[order][:, order]


def other_block(factors: Factors, name: str) -> Tensor | None:
    """H_out (m, m) of the linear of the same name in the block half the model away."""
    blocks = {match[0] for other in factors.linears if (match := NUMBER.search(other))}
    found = NUMBER.search(name)
    if found is None:
        raise SystemExit(f"{name}: has no block number")
    b = (int(found[0]) + len(blocks) // 2) % len(blocks)
    return factors.load(NUMBER.sub(str(b), name, count=1), "H_out")


KINDS = {"shuffled": shuffled, "other-block": other_block}


def write_control(source: str | Path, out: Path, kind: str) -> None:
    """Write the factors of ``source`` to ``out``, each H_out replaced."""
    factors = Factors(source)
    for file in factors.files:
        tensors = {}
        for name, side in factors.keys(file):
            H = factors.load(name, side) if side == "H_in" else KINDS[kind](factors, name)
            if H is not None:
                tensors[f"{name}.{side}"] = pack(H)
        write_tensors(out / file.name, tensors, factors.metadata[file])


def main() -> None:
    """Write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="a directory of factors, or a work directory with one collection")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=KINDS, required=True)
    args = parser.parse_args()
    write_control(args.source, args.out, args.kind)


if __name__ == "__main__":
    main()
