"""Which bits for which linears: every candidate's loss in nats, measured layer by layer, and the best choice within a budget.

½·c·f of a layer, f being the two-sided loss of its rounded weight and c its estimator's scale, approximates the KL
divergence per token that rounding this layer alone makes (``estimators.Fisher``); layers are taken to add up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bakron.core.allocation import allocate
from bakron.core.layers import LinearSpec, Scheme
from bakron.errors import ConfigError, ModelError, OutputExistsError
from bakron.estimators import Fisher, get_estimator
from bakron.run.collect import factors
from bakron.run.factors import of_piece
from bakron.run.pipeline import Job
from bakron.run.plan import Plan
from bakron.run.progress import Progress, Silent, stage
from bakron.run.recipe import recipe_text, rules_for
from bakron.run.settings import Settings
from bakron.run.solve import Statistics, problem_of, rounded
from bakron.run.stages import absolute
from bakron.run.store import Store, held, require_space, write_text

BITS = (2, 3, 4)


def plan(
    model: str | Path,
    out: str | Path,
    *,
    bpw: float,
    bits: Sequence[int] = BITS,
    group_sizes: Sequence[int] = (),
    work: str | Path | None = None,
    keep_work: bool = False,
    overwrite: bool = False,
    recipe: str | Path | None = None,
    progress: Progress | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Choose bits for every linear of ``model`` and write them to ``out``, a recipe for ``quantize``; returns its record.

    bpw: bits per quantized weight on disk, scales and zeros included, that the whole may take.  bits, group_sizes (none:
    that of the settings): the candidates are all their pairs.  Linears that inference engines join get the same.
    work: where finished pieces are kept until the recipe is written, ``out`` + ".work" by default; with ``keep_work``
    they serve other budgets and candidates.  recipe, settings: of the run to be planned; they go into ``out``.
    Losses are measured one layer at a time with inputs of the original model, whatever ``inputs`` says.

    The record: ``kl``, in nats per token, and ``bits_per_weight`` of the plan; the same of each candidate everywhere under
    ``uniform``; and a row for each linear, with its choice and the ``kl`` of each candidate in the order of ``uniform``.
    Raises the named errors of ``bakron.errors``, before work starts where it can be known.
    """
    out = Path(out)
    if out.exists() and not overwrite:
        raise OutputExistsError(f"{out}: exists. Choose another file, or pass overwrite.")
    work = Path(work) if work else out.with_name(out.name + ".work")
    chosen = Settings.load(recipe, **settings)
    candidates = _candidates(chosen, bits, group_sizes)
    _require_nats(chosen)
    job = Job(str(model), _with_scheme(chosen, candidates[0], inputs="static"), work, progress or Silent())
    choice = _Choice.of(job, candidates, bpw)
    memory_plan = dataclasses.replace(job.plan(), output=0, bits_per_weight=bpw)
    if on_plan:
        on_plan(memory_plan)
    require_space(work, memory_plan.disk, "the work directory")
    with held(work, keep_work=keep_work):
        store = _store(job)
        job.collect()
        losses = _losses(job, candidates, store)
        picks = choice.best(losses)
        schemes = {
            spec.name: candidates[pick]
            for unit, pick in zip(choice.units, picks, strict=True)
            for spec in unit
        }
        base, rules = rules_for(job.decoder.root, choice.units, schemes)
        final = dataclasses.replace(_with_scheme(chosen, base), layers=tuple(rules))
        if final.calibration is not None:
            final = dataclasses.replace(final, calibration=absolute(final.calibration))
        record = _record(job, choice, candidates, losses, schemes)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, recipe_text(final, _comments(record)))
    return record


@dataclass(frozen=True)
class _Choice:
    """What there is to choose: units of linears that go together, the bytes of each in each candidate, and the budget."""

    units: list[list[LinearSpec]]
    costs: list[list[int]]
    n_weights: int
    budget: int

    @classmethod
    def of(cls, job: Job, candidates: Sequence[Scheme], bpw: float) -> _Choice:
        """Raises FormatError when a candidate cannot be stored, ConfigError when no choice comes to ``bpw``."""
        flat = job.flat_targets
        job.exporter.check(dict.fromkeys(candidates, flat))
        by_name = {spec.name: spec for spec in flat}
        sets = [[by_name[name] for name in names if name in by_name] for names in job.decoder.fused]
        units = [unit for unit in sets if unit]
        dtype = job.export_plan.scale_dtype
        costs = [
            [sum(job.exporter.stored_bytes(s.d_out, s.d_in, scheme, dtype) for s in unit) for scheme in candidates]
            for unit in units
        ]  # fmt: skip
        n_weights = job.export_plan.quantized_weights
        least, most = (8 * sum(map(pick, costs)) / n_weights for pick in (min, max))
        if least == most:
            raise ConfigError(
                f"format: {job.settings.format} takes {least:.4g} bits per weight whatever the candidates, so there is "
                "nothing to choose. Choose format compressed-tensors."
            )
        if not least <= bpw <= most:
            raise ConfigError(
                f"bpw: {bpw} is {'below' if bpw < least else 'above'} what the candidates take everywhere, "
                f"{least:.4f} to {most:.4f} bits per weight with scales. Change bpw, or give "
                f"{'smaller bits or larger groups' if bpw < least else 'larger bits or smaller groups'}."
            )
        return cls(units, costs, n_weights, math.floor(bpw * n_weights / 8 + 1e-6))

    def best(self, losses: dict[str, list[float]]) -> list[int]:
        """The index of each unit's candidate."""
        sums = [[sum(of) for of in zip(*(losses[s.name] for s in unit), strict=True)] for unit in self.units]
        return allocate(sums, self.costs, self.budget)

    def bits_per_weight(self, picks: Sequence[int]) -> float:
        """Bits on disk per weight of a choice, scales and zeros included."""
        return 8 * sum(cost[pick] for cost, pick in zip(self.costs, picks, strict=True)) / self.n_weights


def _candidates(settings: Settings, bits: Sequence[int], group_sizes: Sequence[int]) -> list[Scheme]:
    """All pairs, the smallest first. Raises ConfigError for values out of range, and when there is nothing to choose."""
    if settings.layers:
        raise ConfigError(
            "layers: a plan chooses the bits of each layer itself; remove [[layers]] from the recipe."
        )
    pairs = {(b, g) for b in bits for g in group_sizes or (settings.group_size,)}
    candidates = [
        Scheme(b, g, settings.symmetric) for b, g in sorted(pairs, key=lambda p: (p[0], p[1] != -1, -p[1]))
    ]
    for scheme in candidates:
        settings.quantizer(None, scheme)
    if len(candidates) < 2:
        raise ConfigError(
            f"bits: a plan needs two candidates or more, seen {', '.join(map(str, candidates)) or 'none'}."
        )
    return candidates


def _require_nats(settings: Settings) -> None:
    """Raise ConfigError unless the losses of different layers will be in the same unit, nats."""
    if settings.hessians is not None:
        raise ConfigError(
            "hessians: a plan measures its losses on factors that it collects; leave given ones out."
        )
    if not isinstance(get_estimator(settings.estimator_name), Fisher):
        raise ConfigError(
            f"estimator: {settings.estimator_name} gives losses of another unit in each layer, which a plan cannot "
            "compare. Choose shampoo, sequence, token or kfac."
        )
    if settings.labels != "model":
        raise ConfigError(
            "labels: a plan predicts the KL divergence, whose labels are the model's own; choose model."
        )


def _with_scheme(settings: Settings, scheme: Scheme, **changes: Any) -> Settings:
    return dataclasses.replace(settings, **dataclasses.asdict(scheme), **changes)


def _store(job: Job) -> Store:
    """Losses by linear and candidate. Raises ResumeError when they were measured otherwise."""
    names = ("method", "scale", "percdamp_in", "percdamp_out", "shrink_out", "act_order", "refine", "kernel")
    settings = {name: getattr(job.settings, name) for name in (*names, "label_samples")}
    facts = {"estimator": job.settings.estimator_name, "scale_dtype": str(job.export_plan.scale_dtype)}
    return Store(job.work / "losses", {**job.data_facts, **settings, **facts})


def _losses(job: Job, candidates: Sequence[Scheme], store: Store) -> dict[str, list[float]]:
    """Of each linear the KL divergence in nats per token that each candidate is predicted to make; kept in ``store``."""
    losses: dict[str, list[float]] = {}
    with stage(job.progress, "measure every candidate", len(job.flat_targets) * len(candidates)):
        for b, specs in enumerate(job.targets):
            wanted = [spec for spec in specs if not all(store.has(_piece(spec, c)) for c in candidates)]
            statistics = Statistics()
            if wanted:
                statistics.load(*of_piece(job.collected, factors(job.need, b)), job.decoder.groups[b])
            for spec in wanted:
                _measure(job, spec, statistics, candidates, store)
            for spec in specs:
                losses[spec.name] = [float(store.load(_piece(spec, c))["kl"]) for c in candidates]
                job.progress.advance(len(candidates))
    return losses


def _piece(spec: LinearSpec, scheme: Scheme) -> str:
    kind = "symmetric" if scheme.symmetric else "asymmetric"
    return f"{spec.name}/{scheme.bits}bit-{scheme.group_size}-{kind}"


def _measure(
    job: Job, spec: LinearSpec, statistics: Statistics, candidates: Sequence[Scheme], store: Store
) -> None:
    """Round one linear to each candidate that is not in ``store`` yet, and keep ½·c·f of what a loader would see."""
    hessian = statistics.hessian(spec.name)
    if hessian.H_in is None or hessian.H_out is None:
        raise ModelError(
            f"{spec.name}: no gradient reached it from the calibration text, so nothing is known about it; list it in skip."
        )
    estimator = get_estimator(job.settings.estimator_name)
    assert isinstance(estimator, Fisher)
    per_token = 1.0 if estimator.per_token else hessian.n_sequences / hessian.n_tokens
    nats = 0.5 * per_token * estimator.fisher_scale(hessian.H_in)
    W = job.decoder.get_weight(spec.name)
    problem = problem_of(spec, W, hessian, job.settings)
    for scheme in candidates:
        if not store.has(_piece(spec, scheme)):
            layer, _ = rounded(spec, problem, W, job.settings, scheme, job.export_plan.scale_dtype)
            kl = max(0.0, nats * hessian.loss(layer.weight().to(W) - W))
            store.save(_piece(spec, scheme), {"kl": torch.tensor(kl, dtype=torch.float64)})


def _record(
    job: Job,
    choice: _Choice,
    candidates: Sequence[Scheme],
    losses: dict[str, list[float]],
    schemes: dict[str, Scheme],
) -> dict[str, Any]:
    picks = [candidates.index(schemes[unit[0].name]) for unit in choice.units]
    return {
        "model": job.source.name,
        "method": job.settings.method,
        "estimator": job.settings.estimator_name,
        "n_sequences": len(job.sequences),
        "n_tokens": sum(map(len, job.sequences)),
        "bits_per_weight": choice.bits_per_weight(picks),
        "kl": sum(losses[name][candidates.index(scheme)] for name, scheme in schemes.items()),
        "uniform": [
            {
                **dataclasses.asdict(scheme),
                "bits_per_weight": choice.bits_per_weight([i] * len(choice.units)),
                "kl": sum(of[i] for of in losses.values()),
            }
            for i, scheme in enumerate(candidates)
        ],
        "layers": [
            {
                "name": name,
                **dataclasses.asdict(schemes[name]),
                "weights": s.d_out * s.d_in,
                "kl": losses[name],
            }
            for name, s in ((s.name, s) for s in job.flat_targets)
        ],
    }


def _comments(record: dict[str, Any]) -> list[str]:
    """What the head of the recipe says."""
    lines = [
        f"{record['bits_per_weight']:.4f} bits per weight, predicted KL {record['kl']:.4g} nats per token "
        f"({record['method']}, {record['estimator']} Hessians of {record['n_sequences']} sequences, layers independent)"
    ]
    for row in record["uniform"]:
        scheme = Scheme(row["bits"], row["group_size"], row["symmetric"])
        lines.append(f"{scheme} everywhere: {row['bits_per_weight']:.4f}, {row['kl']:.4g}")
    return lines
