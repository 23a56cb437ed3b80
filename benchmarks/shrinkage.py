"""How strongly to damp or shrink H_out when few sequences are behind it, judged by sequences that no solver saw.

    python benchmarks/shrinkage.py demo/smollm2 demo/wikipedia/calibration.jsonl demo/wikipedia/heldout.jsonl \\
        --blocks 12 24 --sequences 8 16 32

Solves the linears of some blocks as ``bakron quantize`` does (but for its sequential inputs: all are the original model's)
with factors of the first n calibration sequences, and prints geometric means over the linears (and the
worst linear) of the held-out loss over that of the one-sided solution, in two metrics of the held-out sequences: E[⟨G, E⟩²], the Fisher matrix itself, and
tr(H_out E H_in Eᵀ). Two-sided solutions are those of

    damp λ       percdamp_out = λ, shrink_out = 0
    shrink α     percdamp_out = 0.01, shrink_out = α
    auto         percdamp_out = auto: λ for each linear, of least expected squared error of H_out (Ledoit and Wolf, 2004)
    auto shrink  α likewise, towards the diagonal (Schäfer and Strimmer, 2005), percdamp_out = 0.01
    two-fold     the λ for each linear that is best when factors of every other sequence are solved with and the others judge
    oracle       the λ for each linear that is best in hindsight, in the metric of the row
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bakron.api import PERCDAMP_IN
from bakron.core.grid import ScalarGrid
from bakron.core.hessian import KroneckerHessian
from bakron.core.linalg import gram
from bakron.core.noise import damping_for, relative_error
from bakron.core.refine import refined
from bakron.core.solution import LayerProblem, solve_problem
from bakron.data import load_sequences
from bakron.kernels import get_kernel, get_panel_kernel
from bakron.models import Decoder, load_decoder
from bakron.quantizers.integer import Integer
from bakron.run.solve import TOKEN_WEIGHT_LIMIT

CPU = torch.device("cpu")
DAMPING = (0.5, 1.0, 2.0, 4.0, 8.0, 32.0, math.inf)
SHRINKAGE = (0.3, 0.6, 0.9)
METRICS = ("Fisher", "factors")
LITTLE = 0.01  # damping beside shrinkage
REFINE = 2


def observe(decoder: Decoder, ids: Tensor, blocks: Sequence[int], seed: int) -> dict[int, dict[str, Tensor]]:
    """``<linear>.x`` (T, d_in) and ``<linear>.g`` (T, d_out) of ``blocks``, with labels drawn from the model."""
    states = [decoder.embed(ids)]
    with torch.no_grad():
        for b in range(decoder.n_blocks):
            states.append(decoder.run_block(b, states[-1]))
    h = states[-1].detach().requires_grad_()
    with torch.enable_grad():
        log_p = decoder.tail(h).log_softmax(-1)
        labels = torch.multinomial(log_p.detach().exp(), 1, generator=torch.Generator().manual_seed(seed))
        gradient = torch.autograd.grad(-log_p.gather(1, labels).sum(), h)[0]
    del log_p
    seen: dict[int, dict[str, Tensor]] = {}
    for b in reversed(range(min(blocks), decoder.n_blocks)):
        seen[b] = {}

        def add(name: str, x: Tensor, g: Tensor, of: dict[str, Tensor] = seen[b]) -> None:
            of[f"{name}.x"], of[f"{name}.g"] = x.clone(), g.clone()

        gradient = decoder.backward_block(b, states[b], gradient, add if b in blocks else lambda *_: None)
    return {b: seen[b] for b in blocks}


class Sequences:
    """What was observed of some sequences, in files, read for one linear at a time."""

    def __init__(self, decoder: Decoder, ids: Sequence[Tensor], blocks: Sequence[int], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.files = {b: [folder / f"{b}-{s}.safetensors" for s in range(len(ids))] for b in blocks}
        for s, one in enumerate(ids):
            if not self.files[blocks[0]][s].exists():
                for b, tensors in observe(decoder, one, blocks, seed=s).items():
                    save_file(tensors, self.files[b][s])

    def of(self, b: int, name: str, wanted: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """x and g of one linear, sequence after sequence."""
        for file in self.files[b][wanted]:
            with safe_open(file, "pt") as opened:
                yield opened.get_tensor(f"{name}.x"), opened.get_tensor(f"{name}.g")


class Noisy:
    """The factors of some sequences, and what the spread of H_out's terms says about damping and shrinking it.

    damping: ``percdamp_out auto``.  to_diagonal: α, in terms of the entries off the diagonal alone.
    """

    def __init__(self, seen: Iterator[tuple[Tensor, Tensor]]) -> None:
        xs, gs, n = [], [], 0
        H_out, squares, off_diagonal = 0.0, 0.0, 0.0
        for x, g in seen:
            term = gram(x.T @ g).double()
            H_out = H_out + term
            squares += float(term.square().sum())
            off_diagonal += _off_diagonal(term)
            xs.append(x)
            gs.append(g)
            n += 1
        assert isinstance(H_out, Tensor)
        self.H_out = H_out / n
        weights = torch.cat(gs).square().sum(1)
        weights = weights.clamp(max=TOKEN_WEIGHT_LIMIT * float(weights.median()))
        self.H_in = gram(torch.cat(xs) * weights.sqrt()[:, None])
        self.damping = damping_for(self.H_out, relative_error(self.H_out, squares / n**2, n))
        square = _off_diagonal(self.H_out)
        self.to_diagonal = min(1.0, (off_diagonal / n - square) / (n - 1) / square)


def _off_diagonal(H: Tensor) -> float:
    return float(H.square().sum() - H.diagonal().square().sum())


def solved(W: Tensor, grid: ScalarGrid, of: Noisy, damping: float, shrinkage: float = 0.0) -> Tensor:
    """The error E (d_out, d_in) of the refined solution; infinite damping is one-sided."""
    H_out = None if math.isinf(damping) else of.H_out
    problem = LayerProblem(
        "layer", W, KroneckerHessian(of.H_in, H_out), PERCDAMP_IN, min(damping, 1e9), shrinkage
    )
    solution = solve_problem(problem, grid, "both", get_kernel("numba", CPU))
    return refined(solution, REFINE, get_panel_kernel(CPU)).weight - W


def errors(W: Tensor, sequences: Sequences, b: int, name: str, n: int, bits: int) -> dict[str, Tensor]:
    """Label → E (d_out, d_in) of every candidate for one linear with n sequences."""
    whole, *halves = (
        Noisy(sequences.of(b, name, wanted)) for wanted in (slice(n), slice(0, n, 2), slice(1, n, 2))
    )
    hessian = KroneckerHessian(whole.H_in, None)
    weights = LayerProblem(name, W, hessian, PERCDAMP_IN, 0.0).column_weights()
    grid = Integer(bits, 64, scale="hessian", scale_dtype=torch.bfloat16).fit(W, weights)
    E = {f"damp {damping:g}": solved(W, grid, whole, damping) for damping in DAMPING}
    E |= {f"shrink {shrinkage:g}": solved(W, grid, whole, LITTLE, shrinkage) for shrinkage in SHRINKAGE}
    E["auto"] = solved(W, grid, whole, whole.damping)
    E["auto shrink"] = solved(W, grid, whole, LITTLE, whole.to_diagonal)
    judged = {
        damping: sum(
            KroneckerHessian(other.H_in, other.H_out.float()).loss(solved(W, grid, half, damping))
            for half, other in (halves, halves[::-1])
        )
        for damping in DAMPING
    }
    best = min(judged, key=lambda damping: judged[damping])
    E["two-fold"] = E[f"damp {best:g}"]
    chosen = f"auto λ {whole.damping:.3g}, α {whole.to_diagonal:.3f}, two-fold λ {best:g}"
    print(f"{name}, {n} sequences: {chosen}", file=sys.stderr, flush=True)
    return E


def losses(E: dict[str, Tensor], held_out: Sequences, b: int, name: str) -> list[dict[str, float]]:
    """Label → held-out loss over that of the one-sided solution, in the Fisher matrix and in the held-out factors."""
    fisher = dict.fromkeys(E, 0.0)
    for x, g in held_out.of(b, name, slice(None)):
        G = g.T @ x
        for label, error in E.items():
            fisher[label] += float((G * error).sum(dtype=torch.float64)) ** 2
    factors = Noisy(held_out.of(b, name, slice(None)))
    metric = KroneckerHessian(factors.H_in, factors.H_out.float())
    rows = [fisher, {label: metric.loss(error) for label, error in E.items()}]
    for row in rows:
        row["oracle"] = min(row[f"damp {damping:g}"] for damping in DAMPING)
    return [{label: value / row["damp inf"] for label, value in row.items()} for row in rows]


def main() -> None:
    """Measure and print the table, in groups of columns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration")
    parser.add_argument("held_out")
    parser.add_argument("--blocks", type=int, nargs="+", default=[12, 24])
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--held-out-sequences", type=int, default=48)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument(
        "--work", type=Path, help="where observations are kept; a temporary directory by default"
    )
    args = parser.parse_args()
    decoder = load_decoder(args.model, dtype=torch.float32)
    texts = ((args.calibration, max(args.sequences)), (args.held_out, args.held_out_sequences))
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        train, held_out = (
            Sequences(
                decoder,
                load_sequences(
                    text, decoder.tokenizer, n_sequences=n, sequence_length=args.sequence_length, seed=0
                ),
                args.blocks,
                work / kind,
            )
            for kind, (text, n) in zip(("train", "held-out"), texts, strict=True)
        )
        ratios: dict[tuple[str, str], dict[int, list[float]]] = {}
        for n in args.sequences:
            for b in args.blocks:
                for spec in decoder.linears[b]:
                    E = errors(decoder.get_weight(spec.name), train, b, spec.name, n, args.bits)
                    for metric, row in zip(METRICS, losses(E, held_out, b, spec.name), strict=True):
                        for label, ratio in row.items():
                            ratios.setdefault((metric, label), {}).setdefault(n, []).append(ratio)
    print(f"| metric | solution | {' | '.join(f'{n} sequences' for n in args.sequences)} |")
    print("|---" * (2 + len(args.sequences)) + "|")
    for (metric, label), row in ratios.items():
        cells = [f"{statistics.geometric_mean(of):.3f} ({max(of):.2f})" for of in row.values()]
        print(f"| {metric} | {label} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
