"""What runs on large models would need, computed from their shapes; nothing here is measured.

    python benchmarks/scaling.py

Memory and disk are the formulas of ``bakron.run.plan`` (tests compare them), for the default method with sequential
inputs. Time is a count of operations over assumed rates: products of the forward and backward passes in the model's
dtype, everything else in float32, factorisations and certificates in float64. Attention scores, reading and writing files,
and everything that is not a matrix product are left out, so it is a lower bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bakron.run.collect import HEAD_CHUNK
from bakron.run.plan import MATRICES_IN_SOLVE
from bakron.run.ranks import Ranks

GB = 1e9


@dataclass(frozen=True)
class Linear:
    """y = W x, W (d_out, d_in).

    tokens: the share of all tokens that it sees.  part: of the block, solved at one time.
    writes: whether y is added to the hidden state.
    """

    d_out: int
    d_in: int
    part: int = 0
    writes: bool = False
    tokens: float = 1.0

    @property
    def weights(self) -> int:
        """Their number."""
        return self.d_out * self.d_in

    @property
    def cost(self) -> int:
        """mn(m+n), operations of a sweep."""
        return self.weights * (self.d_out + self.d_in)


@dataclass(frozen=True)
class Model:
    """Linears of each kind of block with the number of such blocks, width, vocabulary, and weights that stay as they are.

    itemsize: bytes of a weight and of a number in the hidden state.
    """

    name: str
    blocks: Sequence[tuple[int, Sequence[Linear]]]
    width: int
    vocabulary: int
    others: int
    itemsize: int = 2

    def over_blocks(self, of_linear: Callable[[Linear], float]) -> float:
        """The sum of a function of a linear over all of them."""
        return sum(n * of_linear(linear) for n, linears in self.blocks for linear in linears)

    @property
    def n_blocks(self) -> int:
        """All of them."""
        return sum(n for n, _ in self.blocks)

    @property
    def quantized(self) -> int:
        """Weights in linears."""
        return int(self.over_blocks(lambda s: s.weights))

    @property
    def largest(self) -> Sequence[Linear]:
        """The linears of the block with the largest factors."""
        return max(
            (linears for _, linears in self.blocks), key=lambda linears: sum(s.d_in**2 for s in linears)
        )


def attention(width: int, kv: int) -> list[Linear]:
    """q, k, v and o, keys and values being ``kv`` wide."""
    narrow = [Linear(kv, width)] * 2
    return [Linear(width, width), *narrow, Linear(width, width, writes=True)]


def mlp(width: int, hidden: int, n: int = 1, tokens: float = 1.0) -> list[Linear]:
    """gate, up and down of each of n experts."""
    up = Linear(hidden, width, part=1, tokens=tokens)
    return [up, up, Linear(width, hidden, part=1, writes=True, tokens=tokens)] * n


MODELS = (
    Model("8B dense", [(32, attention(4096, 1024) + mlp(4096, 14336))], 4096, 128256, 2 * 128256 * 4096),
    Model("70B dense", [(80, attention(8192, 1024) + mlp(8192, 28672))], 8192, 128256, 2 * 128256 * 8192),
    Model(
        "400B, 128 experts",
        [
            (24, attention(5120, 1024) + mlp(5120, 16384)),
            (24, attention(5120, 1024) + mlp(5120, 8192) + mlp(5120, 8192, 128, 1 / 128)),
        ],
        5120,
        202048,
        2 * 202048 * 5120,
    ),
)


@dataclass(frozen=True)
class Machine:
    """Several of one kind of GPU. memory: bytes.  half, single, double: operations per second, assumed, not measured."""

    n: int
    gpu: str
    memory: float
    half: float
    single: float
    double: float


MACHINES = (
    Machine(1, "24 GB", 24 * GB, 60e12, 25e12, 0.5e12),
    Machine(8, "80 GB", 80 * GB, 350e12, 40e12, 30e12),
    Machine(32, "80 GB", 80 * GB, 350e12, 40e12, 30e12),
)


def memory(model: Model, tokens: int, longest: int, n_ranks: int) -> dict[str, float]:
    """Bytes in each process, by what they are for; ``gathered``: on the first rank, in the CPU's memory."""
    block, b = model.largest, model.itemsize
    factors = sum(8 * s.d_in**2 + 8 * s.weights + 4 * s.d_out**2 for s in block)
    factors += max(4 * MATRICES_IN_SOLVE * s.weights + 24 * (s.d_in**2 + s.d_out**2) for s in block)
    states = tokens * model.width * b
    if n_ranks > 1:
        factors += 8 * max(max(s.d_in, s.d_out) ** 2 for s in block)
    return {
        "model": b * (model.quantized + model.others),
        "factors": factors,
        "states": 5 * -(-states // n_ranks),
        "activations": longest * sum(s.d_in + s.d_out for s in block) * b * 3
        + min(longest, HEAD_CHUNK) * model.vocabulary * 4 * 5,
        "gathered": 2 * states if n_ranks > 1 else 0,
    }


def disk(model: Model, tokens: int) -> float:
    """Bytes of the work directory at its largest: states around all blocks, packed H_out and token weights, codes."""
    states = tokens * model.width * model.itemsize * (model.n_blocks + 1 + 3)
    stored = model.over_blocks(lambda s: 2 * s.d_out * (s.d_out + 1) + 4 * tokens)
    return states + stored + 2 * model.quantized


def output(model: Model, bits: int, group: int) -> float:
    """Bytes of the checkpoint: codes, a scale of two bytes for each group, the other weights as they are."""
    return model.quantized * (bits / 8 + 2 / group) + model.itemsize * model.others


def operations(model: Model, tokens: int, sequences: int) -> dict[str, float]:
    """Of all ranks together, by kind of number: ``half``, ``single``, and those of the solve."""
    active = model.over_blocks(lambda s: s.weights * s.tokens)
    attention_part = model.over_blocks(lambda s: s.weights * s.tokens * (s.part == 0))
    # collect: forward, forward again, gradients of the inputs; solve: inputs of each part, states to reach, forward
    passes = 2 * (3 * active + 2 * active + 2 * attention_part)
    passes += 4 * model.vocabulary * model.width  # the head, forward and backward
    per_token = model.over_blocks(
        lambda s: 2 * s.tokens * (s.weights + s.d_in**2 + s.weights * s.writes)  # G, H_in, cross
    )
    per_sequence = model.over_blocks(lambda s: 2 * s.weights * s.d_out)  # GGᵀ
    return {
        "half": tokens * passes,
        "single": tokens * per_token + sequences * per_sequence,
        "sweeps": model.over_blocks(lambda s: s.cost),
        "double": model.over_blocks(lambda s: s.cost + s.d_out**3 + s.d_in**3),
    }


def busiest(model: Model, n_ranks: int) -> float:
    """The share of the solve's work that is waited for: in each part of a block, that of the rank with most to do."""
    ranks = Ranks()
    ranks.size = n_ranks
    waited = 0.0
    for n, linears in model.blocks:
        for part in {s.part for s in linears}:
            costs = [s.cost for s in linears if s.part == part]
            load = [0.0] * n_ranks
            for cost, owner in zip(costs, ranks.owners(costs), strict=True):
                load[owner] += cost
            waited += n * max(load)
    return waited / model.over_blocks(lambda s: s.cost)


def seconds(model: Model, machine: Machine, tokens: int, sequences: int) -> dict[str, float]:
    """``collect`` and sums (shared by sequences), and ``solve`` (shared by linears)."""
    counted = operations(model, tokens, sequences)
    shared = counted["half"] / machine.half + counted["single"] / machine.single
    solve = counted["sweeps"] / machine.single + counted["double"] / machine.double
    return {"sums": shared / min(machine.n, sequences), "solve": solve * busiest(model, machine.n)}


def traffic(model: Model, tokens: int, n_ranks: int) -> float:
    """Bytes that a rank in the middle sends: each sum onward and its total to others, states to the first, its codes."""
    if n_ranks == 1:
        return 0.0
    sums = model.over_blocks(lambda s: 8 * (s.d_out**2 + s.d_in**2 + s.weights * s.writes))
    states = 3 * (model.n_blocks + 1) * tokens * model.width * model.itemsize / n_ranks
    return 2 * sums + states + model.quantized / n_ranks


def table(sequences: int, length: int, bits: int, group: int) -> list[str]:
    """A row for each model on its machines, in Markdown."""
    tokens = sequences * length
    lines = [
        "| model, linears | GPUs | on each GPU | of it: model, factors, states, activations | first rank's CPU | work on disk "
        "| checkpoint | sums | solve | sent by a rank |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model, machine in zip(MODELS, MACHINES, strict=True):
        parts = memory(model, tokens, length, machine.n)
        host = parts.pop("gathered")
        time = seconds(model, machine, tokens, sequences)
        every = (sum(parts.values()), *parts.values())
        all_of_it, *each = (f"{value / GB:,.1f}" for value in every)
        fits = "" if sum(parts.values()) <= machine.memory else ", **does not fit**"
        cells = (
            f"{model.name}, {model.quantized / 1e9:.1f}·10⁹ weights",
            f"{machine.n} × {machine.gpu}",
            f"{all_of_it} GB{fits}",
            " + ".join(each),
            f"{host / GB:.1f} GB",
            f"{disk(model, tokens) / GB:,.0f} GB",
            f"{output(model, bits, group) / GB:,.1f} GB",
            f"{time['sums'] / 60:.1f} min",
            f"{time['solve'] / 60:.1f} min",
            f"{traffic(model, tokens, machine.n) / GB:,.0f} GB",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Print the table of docs/scaling.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n-sequences", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    arguments = parser.parse_args()
    print(
        "\n".join(
            table(arguments.n_sequences, arguments.sequence_length, arguments.bits, arguments.group_size)
        )
    )


if __name__ == "__main__":
    main()
