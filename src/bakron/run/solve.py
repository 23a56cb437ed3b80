"""Second stage: round the linears block by block, with static factors or with inputs from the quantized prefix.

Each rank runs its share of the sequences, and rounds its share of the linears whose inputs are taken at the same time.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bakron.api import PERCDAMP_OUT
from bakron.core.hessian import KroneckerHessian
from bakron.core.layers import LinearSpec, Scheme, SolvedLayer
from bakron.core.linalg import gram
from bakron.core.noise import damping_for
from bakron.core.refine import refined
from bakron.core.solution import LayerProblem, Solution, solve_problem
from bakron.core.spectrum import effective_rank
from bakron.core.target import aimed_weight
from bakron.errors import CertificateError, ModelError
from bakron.kernels import get_kernel, get_panel_kernel
from bakron.models import Decoder
from bakron.quantizers import fitted, storable
from bakron.run.collect import Need, boundary, check_finite, factors, load_states
from bakron.run.factors import COUNTS, Factors, of_piece
from bakron.run.progress import Progress, stage
from bakron.run.ranks import Ranks
from bakron.run.rules import bits_text
from bakron.run.settings import Settings
from bakron.run.store import Store

TOKEN_WEIGHT_LIMIT = (
    3  # × their median: else a few attention sinks outweigh all other tokens (docs/experiments.md)
)
CERTIFICATE_LIMIT = 1e-3  # grid steps; honest float32 sweeps stay below 1e-5, a wrong code is near 0.5


def solved(b: int) -> str:
    """The piece that holds the codes, scales and zeros of block b, and its report in the metadata."""
    return f"solved/{b:04d}"


def _state(b: int) -> str:
    return f"states/{b:04d}"


def solve_model(
    decoder: Decoder,
    targets: Sequence[Sequence[LinearSpec]],
    lengths: Sequence[int],
    settings: Settings,
    schemes: Mapping[str, Scheme],
    scale_dtype: torch.dtype,
    collected: Store | Factors | None,
    need: Need,
    store: Store,
    progress: Progress,
) -> None:
    """Fill ``store`` with the solved ``targets`` of every block, together with all its ranks; finished blocks are kept.
    Weights of ``decoder`` change.

    lengths: of all sequences.
    schemes: of the targets, by name.  collected: what ``collect`` made of ``need``, or given factors; None when no data is
    used.  scale_dtype: of the scales in the checkpoint.
    """
    sequential = settings.sequential
    mine = store.ranks.share(len(lengths))
    steps = len(mine) if sequential else 1
    with stage(
        progress, f"solve ({settings.method}, {bits_text(schemes.values())} bit)", decoder.n_blocks * steps
    ):
        states: list[Tensor] | None = None
        for b in range(decoder.n_blocks):
            if store.has(solved(b)):
                progress.advance(steps)
                continue
            statistics = Statistics()
            piece = factors(need, b)
            if isinstance(collected, Factors):
                statistics.load(*collected.of(targets[b]), decoder.groups[b])
            elif collected is not None and collected.has(piece):
                statistics.load(*of_piece(collected, piece), decoder.groups[b])
            aims = {}
            if sequential:
                assert isinstance(collected, Store)
                if states is None:
                    source, piece = (collected, boundary(0)) if b == 0 else (store, _state(b))
                    states = load_states(source, piece, lengths, decoder)
                if settings.aim_used:
                    aims = _states_to_reach(decoder, b, collected, lengths)
            layers, report = {}, []
            for part in _parts(decoder, b, targets[b]) if sequential else [targets[b]]:
                if states is not None:
                    statistics.observe(decoder, b, part, states, aims, lengths, store.ranks)
                found = _solve_part(decoder, part, statistics, settings, schemes, scale_dtype, store.ranks)
                for spec, (layer, row) in zip(part, found, strict=True):
                    layers |= {
                        f"{spec.name}.{key}": getattr(layer, key) for key in ("codes", "scale", "zero")
                    }
                    report.append(row)
                    if sequential:
                        decoder.set_weight(spec.name, layer.weight(decoder.dtype))
            if states is not None:
                for i, h in enumerate(states):
                    with torch.no_grad():
                        states[i] = decoder.run_block(b, h)
                    check_finite(states[i], f"block {b} (quantized)", mine[i])
                    progress.advance()
                if b + 1 < decoder.n_blocks:
                    store.save(_state(b + 1), store.ranks.joined({"h": states}))
            else:
                progress.advance()
            store.save(solved(b), layers, {"report": report})
            store.remove(_state(b))


def _parts(decoder: Decoder, b: int, targets: Sequence[LinearSpec]) -> list[list[LinearSpec]]:
    """The targets of block b cut after each linear that writes to the hidden state: attention, then MLP.

    The inputs of a part are taken once the parts before it are quantized.
    """
    parts: list[list[LinearSpec]] = [[]]
    writers = [writer.name for writer in decoder.writers(b)]
    for spec in decoder.linears[b]:
        if spec in targets:
            parts[-1].append(spec)
        if spec.name in writers:
            parts.append([])
    return [part for part in parts if part]


def _states_to_reach(
    decoder: Decoder, b: int, collected: Store, lengths: Sequence[int]
) -> dict[str, list[Tensor]]:
    """The original model's hidden states right after each residual writer of block b, one (T, d) a sequence.

    To be called while the block still has its original weights.
    """
    *earlier, last = decoder.writers(b) or (None,)
    if last is None:
        return {}
    reached: dict[str, list[Tensor]] = {writer.name: [] for writer in earlier}
    for h in load_states(collected, boundary(b), lengths, decoder) if earlier else ():
        outputs = decoder.run_block_capturing(b, h, outputs=True, until=earlier[-1].name)[2]
        for writer in earlier:
            h = h + writer.added(outputs[writer.name])
            reached[writer.name].append(h)
    return {**reached, last.name: load_states(collected, boundary(b + 1), lengths, decoder)}


def load_solved(
    store: Store, specs: Sequence[LinearSpec], b: int, schemes: Mapping[str, Scheme]
) -> dict[str, SolvedLayer]:
    """The solved layers of block b by linear name, in the ``schemes`` (by name) that they were solved in."""
    tensors = store.load(solved(b))
    return {
        spec.name: SolvedLayer(
            spec, schemes[spec.name], *(tensors[f"{spec.name}.{key}"] for key in ("codes", "scale", "zero"))
        )
        for spec in specs
    }


@dataclass
class Statistics:
    """What is known about the linears of one block: stored factors, and sums over inputs of the quantized prefix."""

    stored: dict[str, Tensor] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    error_out: Mapping[str, float | None] = field(default_factory=dict)
    H_in: dict[str, Tensor] = field(default_factory=dict)
    cross: dict[str, Tensor] = field(default_factory=dict)
    owner: dict[str, str] = field(default_factory=dict)

    def load(
        self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], groups: Sequence[Sequence[str]]
    ) -> None:
        """Take over what was collected from the original model, its factors whole; an H_in may be stored once for a group."""
        self.stored = dict(tensors)
        self.counts = {key: facts[key] for key in COUNTS}
        self.error_out = facts["error_out"]
        for key, w in tensors.items():
            if key.endswith(".token_weights"):
                typical = w[w > 0].median() if bool((w > 0).any()) else w.new_ones(())
                self.stored[key] = w.clamp(max=TOKEN_WEIGHT_LIMIT * float(typical))
        for group in groups:
            for name in group:
                self.owner[name] = name if f"{name}.H_in" in tensors else group[0]

    def observe(
        self,
        decoder: Decoder,
        b: int,
        specs: Sequence[LinearSpec],
        states: Sequence[Tensor],
        aims: Mapping[str, Sequence[Tensor]],
        lengths: Sequence[int],
        ranks: Ranks,
    ) -> None:
        """Sum Σ w x̂x̂ᵀ over the inputs x̂ that ``specs`` get when ``states`` (of the quantized prefix) enter block b.

        ``states`` and ``aims`` are of this rank's sequences, ``lengths`` and the sums of those of all ``ranks``.
        For those whose output is added to the hidden state, and for which ``aims`` has the state h to reach
        thereby, also Σ w r x̂ᵀ, r being the change of the output that would lead there from the state ĥ reached: h − ĥ,
        but for norms in between.
        """
        mine = ranks.share(len(lengths))
        self.counts = {"n_sequences": len(lengths), "n_tokens": sum(lengths)}
        weights = {}
        for spec in specs:
            if (w := self.stored.get(f"{spec.name}.token_weights")) is not None:
                weights[spec.name] = w.to(decoder.device).split(list(lengths))[mine.start : mine.stop]
        for spec in specs:
            group = next(group for group in decoder.groups[b] if spec.name in group)
            unweighted = next((name for name in group if name not in weights), spec.name)
            self.owner[spec.name] = spec.name if spec.name in weights else unweighted
        owners = sorted({self.owner[spec.name] for spec in specs})
        chosen = {spec.name for spec in specs}
        H_in: dict[str, Tensor] = {}
        cross: dict[str, Tensor] = {}
        for index, h in enumerate(states):
            _, inputs, outputs = decoder.run_block_capturing(b, h, outputs=True, until=specs[-1].name)
            for owner in owners:
                x = _seen(inputs, owner).float()
                if owner in weights:
                    x = x * weights[owner][index].sqrt()[:, None]
                _accumulate(H_in, owner, gram(x))
            for writer in decoder.writers(b) if aims else ():
                name = writer.name
                if name not in outputs:
                    break
                h = h + writer.added(outputs[name])
                if name in chosen:
                    wanted = writer.wanted(outputs[name].float(), (aims[name][index] - h).float())
                    if name in weights:
                        wanted = wanted * weights[name][index][:, None]
                    _accumulate(cross, name, wanted.T @ inputs[name].float())
        self.H_in |= ranks.total(H_in)
        self.cross |= ranks.total(cross)

    def hessian(self, name: str) -> KroneckerHessian:
        """The factors to solve ``name`` with."""
        owner = self.owner.get(name, name)
        H_in = self.H_in.get(owner)
        if H_in is None:
            H_in = self.stored.get(f"{owner}.H_in")
        H_out, error = self.stored.get(f"{name}.H_out"), self.error_out.get(name)
        return KroneckerHessian(H_in, H_out, **self.counts, error_out=error)


def _seen(inputs: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in inputs:
        raise ModelError(
            f"{name}: did not run on a calibration sequence, so nothing is known about it; list it in skip."
        )
    return inputs[name]


def _accumulate(sums: dict[str, Tensor], key: str, term: Tensor) -> None:
    if key not in sums:
        sums[key] = torch.zeros_like(term, dtype=torch.float64)
    sums[key] += term


def _solve_part(
    decoder: Decoder,
    part: Sequence[LinearSpec],
    statistics: Statistics,
    settings: Settings,
    schemes: Mapping[str, Scheme],
    scale_dtype: torch.dtype,
    ranks: Ranks,
) -> list[tuple[SolvedLayer, dict[str, Any]]]:
    """Each linear of ``part`` rounded by one of the ranks, by the cost of its sweep, and what came of it, on all."""
    owners = ranks.owners([spec.d_out * spec.d_in * (spec.d_out + spec.d_in) for spec in part])
    found = {
        spec.name: _solve_linear(decoder, spec, statistics, settings, schemes[spec.name], scale_dtype)
        for spec, owner in zip(part, owners, strict=True)
        if owner == ranks.rank
    }
    found = ranks.exchanged(found)
    return [found[spec.name] for spec in part]


def _solve_linear(
    decoder: Decoder,
    spec: LinearSpec,
    statistics: Statistics,
    settings: Settings,
    scheme: Scheme,
    scale_dtype: torch.dtype,
) -> tuple[SolvedLayer, dict[str, Any]]:
    """Round one linear; also its row of the report."""
    started = time.perf_counter()
    W = original = decoder.get_weight(spec.name)
    hessian = statistics.hessian(spec.name)
    if spec.name in statistics.cross and hessian.H_in is not None:
        W = aimed_weight(
            W, statistics.cross[spec.name], hessian.H_in, settings.percdamp_aim, settings.aim_used, spec.name
        )
    layer, solution = rounded(
        spec, problem_of(spec, W, hessian, settings), original, settings, scheme, scale_dtype
    )
    row = {
        "name": spec.name,
        "loss": solution.loss,
        "loss_rtn": solution.loss_rtn,
        "certificate": list(solution.certificate),
        "clip_rate": solution.clip_rate,
        "percdamp": [solution.damping[0], None if solution.problem.H_out is None else solution.damping[1]],
        "n_sequences": hessian.n_sequences,
        "n_tokens": hessian.n_tokens,
        "rank_out": None if hessian.H_out is None else effective_rank(hessian.H_out),
        "error_out": hessian.error_out,
    }
    row["seconds"] = time.perf_counter() - started
    return layer, row


def problem_of(spec: LinearSpec, W: Tensor, hessian: KroneckerHessian, settings: Settings) -> LayerProblem:
    """The problem of rounding ``W`` by the method of ``settings``, which may see less than the whole Hessian.

    With percdamp_out "auto" it is one-sided where H_out may be nothing but noise.
    """
    percdamp_out = settings.percdamp_out
    if settings.method != "bakron":
        hessian = dataclasses.replace(hessian, H_out=None)
    if percdamp_out == "auto":
        percdamp_out = _chosen_damping(hessian)
    if math.isinf(percdamp_out):
        hessian, percdamp_out = dataclasses.replace(hessian, H_out=None), 0.0
    return LayerProblem(spec.name, W, hessian, settings.percdamp_in, percdamp_out, settings.shrink_out)


def _chosen_damping(hessian: KroneckerHessian) -> float:
    """percdamp_out for the noise of H_out, if it is known; infinite where there is no H_out, or nothing but noise in it."""
    if hessian.H_out is None:
        return math.inf
    return PERCDAMP_OUT if hessian.error_out is None else damping_for(hessian.H_out, hessian.error_out)


def rounded(
    spec: LinearSpec,
    problem: LayerProblem,
    original: Tensor,
    settings: Settings,
    scheme: Scheme,
    scale_dtype: torch.dtype,
) -> tuple[SolvedLayer, Solution]:
    """Solve ``problem`` on the grid of ``scheme`` that is fitted to ``original``, then refine.

    Raises CertificateError when the codes are not those of the sweep's definition.
    """
    quantizer = settings.quantizer(scale_dtype, scheme)
    grid = fitted(quantizer, original, lambda: problem.column_weights(settings.act_order))
    device = original.device
    kernel = None if settings.kernel == "reference" else get_kernel(settings.kernel, device)
    solution = solve_problem(problem, grid, settings.act_order, kernel)
    if not solution.certificate.worst <= CERTIFICATE_LIMIT:  # so that NaN fails too
        raise CertificateError(
            f"{spec.name}: the sweep's codes are not those of its own definition, worst excess "
            f"{solution.certificate.worst:.3g} grid steps. This is a defect of kernel {settings.kernel!r}: "
            "choose kernel torch and report it."
        )
    solution = refined(solution, settings.refine, get_panel_kernel(device), storable(quantizer))
    grid = solution.grid
    layer = SolvedLayer(
        spec,
        scheme,
        solution.codes.to(torch.int8).cpu(),
        grid.scale.to(scale_dtype).cpu(),
        grid.zero.to(torch.int32).cpu(),
    )
    return layer, solution
