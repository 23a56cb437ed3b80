"""The plan of a run, made before it starts: memory, disk and time, from the model's sizes and one timed block."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bakron.core.layers import LinearSpec
from bakron.exporters.plan import ExportPlan
from bakron.models import Decoder
from bakron.models.memory import free_memory, parameter_bytes
from bakron.run.collect import HEAD_CHUNK, Need

MATRICES_IN_SOLVE = 12  # W-sized float32 working copies while one linear is solved


@dataclass(frozen=True)
class Plan:
    """What a run will need. memory, disk, output: bytes.  seconds: a rough estimate, None without calibration data.

    memory = model + factors of one block (or what is tuned) + boundary states of one block (+ a single sequence's
    activations), in each of n_ranks processes.
    model is ``model_whole``, or with ``offload`` ``model_one_block``: the largest block and what is outside of blocks.
    disk is that of the work directory at its largest; output that of the checkpoint.
    """

    model_whole: int
    model_one_block: int
    offload: bool
    factors: int
    boundaries: int
    activations: int
    disk: int
    output: int
    bits_per_weight: float
    share_quantized: float
    n_linears: int
    n_tokens: int
    seconds: float | None
    n_ranks: int = 1

    @property
    def model(self) -> int:
        """Bytes of the weights that are in memory at the same time."""
        return self.model_one_block if self.offload else self.model_whole

    @property
    def beside_model(self) -> int:
        """Bytes of all else that is in memory at the same time."""
        return self.factors + self.boundaries + self.activations

    @property
    def memory(self) -> int:
        """Bytes of all that is in memory at the same time, of the process that needs most."""
        return self.model + self.beside_model


def make_plan(
    decoder: Decoder,
    targets: Sequence[Sequence[LinearSpec]],
    lengths: Sequence[int],
    need: Need,
    export: ExportPlan,
    given: bool = False,
    n_ranks: int = 1,
    tune: int = 0,
    n_scales: int = 0,
) -> Plan:
    """The plan for ``targets`` and calibration sequences of ``lengths``, shared by ``n_ranks`` processes.

    given: with factors from elsewhere.  tune: passes that tune ``n_scales`` scales afterwards, all in memory together.
    """
    tokens, longest = sum(lengths), max(lengths, default=0)
    itemsize = decoder.dtype.itemsize
    whole, blocks = parameter_bytes(decoder.model), [parameter_bytes(block) for block in decoder.blocks]
    block = max(range(decoder.n_blocks), key=lambda b: sum(s.d_in**2 for s in decoder.linears[b]))
    specs = decoder.linears[block]
    # float64 sums of H_in and (y − ŷ)x̂ᵀ while the float32 H_out of the block are loaded, and one linear's solve
    sums = sum(8 * s.d_in**2 + 8 * s.d_out * s.d_in + 4 * (s.d_out**2 if need.H_out else 0) for s in specs)
    between = 0  # bytes of a block's factors that one pass hands to the next
    if need.passes > 1:
        between = sum(_packed(s.d_in) + _packed(s.d_out) for s in specs)
        sums += sum(8 * (s.d_in**2 + s.d_out**2) for s in specs)
    largest = max(4 * MATRICES_IN_SOLVE * s.d_out * s.d_in + 24 * (s.d_in**2 + s.d_out**2) for s in specs)
    held = sum(4 * (s.d_in**2 + s.d_out**2) for s in specs)
    state = tokens * decoder.hidden_size * itemsize
    share = -(-state // n_ranks)
    gathered, arriving = 0, 0  # all states on the first rank, in pieces and joined; a sum of the rank before
    if n_ranks > 1:
        gathered, arriving = 2 * need.label_samples * state, 8 * max(max(s.d_in, s.d_out) ** 2 for s in specs)
    wide = sum(s.d_in + s.d_out for s in specs)
    activations = longest * wide * itemsize * 3 + min(longest, HEAD_CHUNK) * decoder.vocab_size * 4 * 5
    stored = decoder.n_blocks * sum(_packed(s.d_out) + 4 * tokens for s in specs) if need.H_out else 0
    stored += decoder.n_blocks * sum(_packed(s.d_in) for s in specs) if need.H_in or between else 0
    boundaries = state * (decoder.n_blocks + 1 if need.boundaries or need.factors else 1)
    gradients = need.label_samples * state
    codes = sum(s.d_out * s.d_in * 2 for specs in targets for s in specs)
    tuning, unfinished = 0, 0
    if tune:  # codes of one byte, scales, zeros, and three numbers for each scale; those are kept on disk
        tuning = codes // 2 + 20 * n_scales + 4 * max(s.d_out * s.d_in for s in specs) * 3
        unfinished = 2 * 12 * n_scales
        activations += decoder.n_blocks * longest * decoder.hidden_size * itemsize
    return Plan(
        model_whole=whole,
        model_one_block=whole - sum(blocks) + max(blocks),
        offload=decoder.offloaded is not None,
        factors=max(largest + (sums + arriving if tokens else 0) + (held if given else 0), tuning),
        boundaries=(3 + 2 * need.label_samples) * share + gathered,
        activations=activations if tokens else 0,
        disk=boundaries + 3 * gradients + stored + between + codes + unfinished,
        output=export.total_bytes,
        bits_per_weight=export.bits_per_weight,
        share_quantized=export.quantized_weights / export.all_weights,
        n_linears=sum(map(len, targets)),
        n_tokens=tokens,
        seconds=_seconds(decoder, lengths, need, n_ranks, tune) if tokens else None,
        n_ranks=n_ranks,
    )


def shortage(plan: Plan, device: torch.device) -> str | None:
    """What is short and what to change, when the memory that a run needs beside the loaded model is not free."""
    free = free_memory(device)
    if free is None or free >= plan.beside_model:
        return None
    change = "Use fewer or shorter sequences"
    if not plan.offload:
        change += f", or offload disk, with which the model takes {plan.model_one_block / 1e9:.2f} GB"
    return (
        f"Beside the model the run needs {plan.beside_model / 1e9:.2f} GB on {device}, where {free / 1e9:.2f} GB are "
        f"free. {change}."
    )


def _packed(n: int) -> int:
    """Bytes of a packed factor (n, n) on disk."""
    return 2 * n * (n + 1)


def _seconds(decoder: Decoder, lengths: Sequence[int], need: Need, n_ranks: int, tune: int) -> float:
    """The time of one block's forward on one sequence, times the number of forwards that the first rank's stages cost."""
    h = decoder.embed(torch.zeros(max(lengths), dtype=torch.int64))
    seconds = []
    for _ in range(2):  # the first one warms up
        started = time.perf_counter()
        with torch.no_grad():
            decoder.run_block(0, h)
        seconds.append(time.perf_counter() - started)
    forwards = (
        2.5
        + (5 * need.passes * need.label_samples if need.gradients else 0)
        + (1 if need.boundaries else 0)
        + (1.5 if need.H_in or (need.H_out and not need.gradients) else 0)
    )
    share = -(-len(lengths) // n_ranks) / len(lengths)
    forwards = forwards * share + 5 * tune  # the first rank tunes alone
    return min(seconds) * decoder.n_blocks * sum(lengths) / max(lengths) * forwards
