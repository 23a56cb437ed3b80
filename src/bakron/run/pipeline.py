"""The stages put together: ``quantize``, and ``collect``, ``solve`` and ``export`` by themselves, meeting in the store."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bakron.api import PERCDAMP_OUT
from bakron.core.layers import LinearSpec, Scheme, SolvedLayer
from bakron.data import fingerprint, load_sequences
from bakron.errors import ConfigError, ModelError, OutputExistsError
from bakron.estimators import Local, get_estimator, uses_gradients
from bakron.exporters import get_exporter
from bakron.exporters.card import model_card
from bakron.exporters.checkpoint import Checkpoint
from bakron.exporters.plan import ExportPlan, plan_export
from bakron.exporters.writer import check_output, write_checkpoint
from bakron.models import Decoder, check_views, load_decoder
from bakron.run.collect import Need, collect
from bakron.run.evaluation import Evaluation
from bakron.run.factors import LAYOUT, Factors
from bakron.run.plan import Plan, make_plan, shortage
from bakron.run.progress import Progress, Silent, stage
from bakron.run.ranks import ALONE, Ranks
from bakron.run.rules import bits_text, check_rules, scheme_of
from bakron.run.settings import Settings
from bakron.run.solve import load_solved, solve_model, solved
from bakron.run.store import Store, held, model_fingerprint, require_space, tensor_sha256
from bakron.run.transformed import changes_of, digests, load_transformed, put_back
from bakron.run.tune import tune, tuned

REPORT = "bakron.json"


@dataclass
class Job:
    """One model and one group of settings: everything that the stages share, checked before any work.

    loaded: the decoder, if it is in memory already.  ranks: the processes that share the work, each with a job like this.
    Raises ModelError, FormatError, DataError or ConfigError from its constructor for whatever can be known by then.
    """

    model: str
    settings: Settings
    work: Path
    progress: Progress = dataclasses.field(default_factory=Silent)
    collected_in: Path | None = None
    ranks: Ranks = ALONE
    loaded: InitVar[Decoder | None] = None

    def __post_init__(self, loaded: Decoder | None) -> None:
        settings = self.settings
        if settings.needs_data and settings.calibration is None:
            raise ConfigError(
                f"calibration: method {settings.method} needs text. Pass a .txt, .jsonl or .safetensors file of token "
                "ids, or the name of a hub dataset."
            )
        self.ranks.require_device(settings.device)
        self.decoder = loaded or load(self.model, settings)
        self.targets = [
            [spec for spec in specs if not any(re.search(pattern, spec.name) for pattern in settings.skip)]
            for specs in self.decoder.linears
        ]
        flat = [spec for specs in self.targets for spec in specs]
        if not flat:
            raise ModelError(
                f"{self.model}: no linear layer is left to quantize; skip = {list(settings.skip)}."
            )
        estimator = get_estimator(settings.estimator_name)
        if isinstance(estimator, Local):
            check_views(self.decoder, estimator.sees)
        self.schemes = {spec.name: scheme_of(spec.name, settings.scheme, settings.layers) for spec in flat}
        linears = [spec for specs in self.decoder.linears for spec in specs]
        check_rules(linears, self.decoder.fused, self.schemes, settings.layers)
        self.exporter = get_exporter(settings.format)
        self.exporter.check(self.by_scheme)
        self.changes = changes_of(self.decoder, self._stored_schemes())
        self.export_plan: ExportPlan = plan_export(
            self.source, self.exporter, self._stored_schemes(), self.changes
        )
        self._note_untied()
        self.sequences = self.ranks.from_first(self._sequences)
        self.hessians = self._given_hessians()

    @property
    def source(self) -> Path:
        """The directory of the original checkpoint."""
        assert self.decoder.path is not None
        return self.decoder.path

    @property
    def flat_targets(self) -> list[LinearSpec]:
        """All linears to quantize, in order of execution."""
        return [spec for specs in self.targets for spec in specs]

    @property
    def by_scheme(self) -> dict[Scheme, list[LinearSpec]]:
        """The linears to quantize, by how they are stored."""
        flat = self.flat_targets
        return {
            scheme: [spec for spec in flat if self.schemes[spec.name] == scheme]
            for scheme in sorted(set(self.schemes.values()))
        }

    def _stored_schemes(self) -> dict[str, Scheme]:
        """How each tensor of the source that is to be quantized is stored, by its name there."""
        return {spec.tensor_key: self.schemes[spec.name] for spec in self.flat_targets}

    @property
    def ignored(self) -> list[str]:
        """All linears of the model that are not quantized: head, routers, and what ``skip`` names."""
        chosen = {spec.name for spec in self.flat_targets}
        skipped = [spec.name for specs in self.decoder.linears for spec in specs if spec.name not in chosen]
        return [*self.decoder.other_linears, *skipped]

    @property
    def need(self) -> Need:
        """What has to be collected before the solve."""
        gradients = uses_gradients(get_estimator(self.settings.estimator_name))
        sequential = self.settings.sequential
        return Need(
            self.settings.estimator_name,
            boundaries=gradients or self.settings.aim_used > 0 or self.settings.tune > 0,
            H_in=self.settings.needs_data and not sequential,
            gradients=gradients,
            labels=self.settings.labels,
            label_samples=self.settings.label_samples if gradients else 1,
        )

    @cached_property
    def data_facts(self) -> dict[str, Any]:
        """What collected work depends on, whatever will be solved from it."""
        model = self.ranks.from_first(lambda: model_fingerprint(self.source))
        if self.settings.transforms:
            model += f" after {'+'.join(self.settings.transforms)}"
        return {
            "model": model,
            "calibration": fingerprint(self.sequences),
            "n_sequences": self.settings.n_sequences,
            "sequence_length": self.settings.sequence_length,
            "sampling": self.settings.sampling,
            "seed": self.settings.seed,
            "dtype": str(self.decoder.dtype),
            "device": self.decoder.device.type,
            "version": version("bakron"),
            "layout": LAYOUT,
        }

    @cached_property
    def collected(self) -> Store:
        """The store of boundary states and factors."""
        return Store(self.collected_in or self.work / "collected", self.data_facts, self.ranks)

    @cached_property
    def solved(self) -> Store:
        """The store of solved layers."""
        settings = self.settings.as_dict()
        for name in ("calibration", "transform", "format", "device", "dtype", "hessians", "offload", "tune"):
            del settings[name]  # in data_facts, or without influence on the codes
        facts = {**self.data_facts, **settings, "scale_dtype": str(self.export_plan.scale_dtype)}
        facts |= {"estimator": self.settings.estimator_name, "aim": self.settings.aim_used}
        if self.hessians:
            facts["hessians"] = self.hessians.sha256
        return Store(self.work / "solved", facts, self.ranks)

    def plan(self) -> Plan:
        """Memory, disk and time that the run will need. Notes when the memory beside the model is not free."""
        plan = make_plan(
            self.decoder,
            self.targets,
            [len(ids) for ids in self.sequences],
            self.need,
            self.export_plan,
            given=self.hessians is not None,
            n_ranks=self.ranks.size,
            tune=self.settings.tune,
            n_scales=sum(
                spec.d_out * self.schemes[spec.name].n_groups(spec.d_in) for spec in self.flat_targets
            ),
        )
        short = shortage(plan, self.decoder.device)
        if short:
            self.progress.note(short)
        return plan

    def reload(self) -> None:
        """Take the weights before rounding again."""
        self.decoder = load(self.model, self.settings)
        self.changes = changes_of(self.decoder, self._stored_schemes())

    def original(self) -> Decoder:
        """The model as it came, with which results are compared: loaded anew if the decoder is a transformed one."""
        if not self.settings.transforms:
            return self.decoder
        return load(self.model, dataclasses.replace(self.settings, transform="none"))

    def collect(self) -> None:
        """First stage."""
        if self.settings.needs_data:
            collect(
                self.decoder, self.sequences, self.need, self.collected, self.settings.seed, self.progress
            )

    def solve(self) -> None:
        """Second stage; the decoder ends up with the quantized weights."""
        with_data = self.settings.needs_data
        solve_model(
            self.decoder,
            self.targets,
            [len(ids) for ids in self.sequences],
            self.settings,
            self.schemes,
            self.export_plan.scale_dtype,
            self.collected if with_data else self.hessians,
            self.need,
            self.solved,
            self.progress,
        )
        self.apply()
        if self.settings.tune and not self.solved.has(self._last):
            self.ranks.from_first(self._tune)
            self.apply()

    @property
    def _last(self) -> str:
        """The piece that the second stage leaves last."""
        b, passes = self.decoder.n_blocks - 1, self.settings.tune
        return tuned(passes, b) if passes else solved(b)

    def _tune(self) -> None:
        tune(
            self.decoder,
            self.sequences,
            self.settings.tune,
            lambda b: load_solved(self.solved, self.targets[b], b, self.schemes),
            self.collected.alone,
            self.solved.alone,
            self.progress,
        )

    @property
    def is_solved(self) -> bool:
        """Whether the second stage is done."""
        return self.solved.has(self._last)

    def _layers(self, b: int) -> dict[str, SolvedLayer]:
        """The layers of block b by name, as they will be stored: after tuning, if it is done."""
        layers = load_solved(self.solved, self.targets[b], b, self.schemes)
        piece = tuned(self.settings.tune, b)
        if not (self.settings.tune and self.solved.has(piece)):
            return layers
        scales = self.solved.load(piece)
        return {
            name: dataclasses.replace(layer, scale=scales[f"{name}.scale"]) for name, layer in layers.items()
        }

    def apply(self) -> None:
        """Give the decoder the solved weights, and those transformed only, as a loader of the checkpoint would see them."""
        put_back(self.decoder, self.changes)
        for b in range(self.decoder.n_blocks):
            self.decoder.replace_weights(b, partial(self._solved_weights, b))

    def _solved_weights(self, b: int) -> Iterator[tuple[str, Tensor]]:
        """The names of the solved linears of block b, and the weights that their codes stand for."""
        for name, layer in self._layers(b).items():
            yield name, layer.weight()

    def report(self) -> list[dict[str, Any]]:
        """A row for each solved linear: losses, certificate, damping, clip rate, data, seconds."""
        rows = []
        for b in range(self.decoder.n_blocks):
            rows += self.solved.metadata(solved(b))["report"]
        return rows

    def export(self, out: Path, quality: dict[str, Any] | None = None, overwrite: bool = False) -> None:
        """Third stage: the checkpoint, its card, and ``bakron.json`` with what ``verify`` needs."""
        blocks: dict[int, dict[str, SolvedLayer]] = {}

        def layer(spec: LinearSpec) -> SolvedLayer:
            if spec.block not in blocks:
                blocks.clear()  # one block in memory
                blocks[spec.block] = self._layers(spec.block)
            return blocks[spec.block][spec.name]

        with stage(self.progress, "export", self.export_plan.n_tensors):
            write_checkpoint(
                self.source,
                out,
                self.exporter,
                {spec.tensor_key: lambda spec=spec: layer(spec) for spec in self.flat_targets},
                self._stored_schemes(),
                ignore=self.ignored,
                card=model_card(self._facts(quality)),
                extra={REPORT: json.dumps(self._record(quality), indent=1) + "\n"},
                changes=self.changes,
                overwrite=overwrite,
                progress=lambda done, total, name: self.progress.advance(),
            )

    def _note_untied(self) -> None:
        for key, tensor in self.changes.added(Checkpoint(self.source)).items():
            self.progress.note(
                f"The rotated model's head is no longer its embedding: {key} adds {tensor.nbytes / 1e6:.1f} MB."
            )

    def _sequences(self) -> list[Tensor]:
        settings, decoder = self.settings, self.decoder
        if not settings.needs_data:
            return []
        assert settings.calibration is not None
        length = settings.sequence_length
        if length > decoder.max_length:
            self.progress.note(
                f"sequence_length {length} is clamped to the model's maximum {decoder.max_length}."
            )
            length = decoder.max_length
        sequences = load_sequences(
            settings.calibration,
            None if settings.calibration.endswith(".safetensors") else decoder.tokenizer,
            n_sequences=settings.n_sequences,
            sequence_length=length,
            seed=settings.seed,
            mode=settings.sampling,
            vocab_size=decoder.vocab_size,
        )
        tokens, widest = sum(map(len, sequences)), max(spec.d_in for spec in self.flat_targets)
        if tokens < widest:
            self.progress.note(
                f"{tokens} calibration tokens are fewer than the widest input, {widest}: H_in is rank-deficient and "
                "leans on its damping. Use more or longer sequences."
            )
        two_sided = settings.method == "bakron" and settings.estimator_name not in ("gram", "identity")
        if len(sequences) == 1 and two_sided and settings.percdamp_out == "auto":
            self.progress.note(
                "One calibration sequence says nothing of how noisy H_out is, so it is left out, and the metric is "
                "one-sided. Use several sequences, or a number for percdamp_out."
            )
        return sequences

    def _given_hessians(self) -> Factors | None:
        """The factors that the settings name, read and found to fit the linears, if they name any."""
        if self.settings.hessians is None:
            return None
        path, model = self.settings.hessians, self.data_facts["model"]
        return self.ranks.from_first(lambda: self._checked_hessians(path, model))

    def _checked_hessians(self, path: str, model: str) -> Factors:
        given = Factors(path)
        given.require(self.flat_targets, model)
        given.check_values(self.progress)
        if self.settings.method == "bakron":
            self._note_given(given)
        given.sha256  # noqa: B018 - all files are read for it, here for all ranks
        return given

    def _note_given(self, given: Factors) -> None:
        two_sided = [spec.name for spec in self.flat_targets if given.has(spec.name, "H_out")]
        n = len(self.flat_targets)
        if len(two_sided) < n:
            self.progress.note(
                f"{n - len(two_sided)} of {n} linears have no H_out in {given.path}: they are rounded in the one-sided "
                "metric of GPTQ."
            )
        unknown = sum(not given.tells_error(name) for name in two_sided)
        if unknown and self.settings.percdamp_out == "auto":
            self.progress.note(
                f"{given.path} does not tell the error of {unknown} H_out of {n} (n_sequences and squares_out in the "
                f"metadata, docs/hessians.md): they are damped with percdamp_out {PERCDAMP_OUT:g}."
            )

    def _facts(self, quality: dict[str, Any] | None) -> dict[str, Any]:
        """What the model card says."""
        settings = self.settings
        calibration = None
        estimator = settings.estimator_name
        if self.hessians:
            estimator = self.hessians.fact("estimator") or "given"
            counts = self.hessians.counts(self.flat_targets[0].name)
            calibration = {
                "source": f"Hessian factors {self.hessians.path.name}",
                "n_sequences": counts["n_sequences"] or None,
                "fingerprint": self.hessians.sha256,
            }
        if settings.needs_data:
            calibration = {
                "source": Path(settings.calibration or "").name,
                "n_sequences": len(self.sequences),
                "sequence_length": max(map(len, self.sequences)),
                "fingerprint": self.data_facts["calibration"],
            }
        plan, schemes = self.export_plan, self.by_scheme
        return {
            "title": f"{self.source.name}, {bits_text(schemes)} bit",
            "base_model": self.source.name,
            "transform": "+".join(settings.transforms) or "none",
            "method": f"{settings.method} ({estimator} Hessians)",
            "format": settings.format,
            **self._scheme_facts(),
            "bits_per_weight": plan.bits_per_weight,
            "share_quantized": plan.quantized_weights / plan.all_weights,
            "calibration": calibration,
            "quality": quality,
            "usage": self.exporter.usage(schemes),
            "settings": {
                **{key: value for key, value in settings.as_dict().items() if key != "offload"},
                "calibration": Path(settings.calibration or "").name or None,
                "hessians": Path(settings.hessians or "").name or None,
            },
            "version": version("bakron"),
        }

    def _scheme_facts(self) -> dict[str, Any]:
        """Bits, group size and symmetry: values where there is one scheme, else a row for each scheme."""
        schemes = self.by_scheme
        if len(schemes) == 1:
            return dataclasses.asdict(next(iter(schemes)))
        rows = [
            {
                **dataclasses.asdict(scheme),
                "linears": len(specs),
                "weights": sum(spec.d_out * spec.d_in for spec in specs),
            }
            for scheme, specs in schemes.items()
        ]
        return {"bits": bits_text(schemes), "schemes": rows}

    def _record(self, quality: dict[str, Any] | None) -> dict[str, Any]:
        """What ``bakron.json`` says: the facts of the card, a row a layer, and digests of the weights that are new."""
        sha256 = digests(self.decoder, self.changes)
        for b in range(self.decoder.n_blocks):
            for layer in self._layers(b).values():
                sha256[layer.spec.name] = tensor_sha256(layer.weight())
        facts = {key: value for key, value in self._facts(quality).items() if key not in ("usage", "title")}
        layers = [{key: value for key, value in row.items() if key != "seconds"} for row in self.report()]
        if len(self.by_scheme) > 1:
            layers = [{**row, **dataclasses.asdict(self.schemes[row["name"]])} for row in layers]
        if self.settings.tune:
            facts["tuned"] = self.solved.metadata(self._last)
        return {**facts, "layers": layers, "sha256": sha256}  # no times: the same run gives the same bytes


def load(model: str | Path, settings: Settings | None = None) -> Decoder:
    """The decoder on the device, in the dtype and after the transforms that ``settings`` ask for.

    dtype auto is float32 on a CPU, else bfloat16.
    """
    settings = settings or Settings()
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if settings.transforms:
        return load_transformed(model, settings.transforms, dtype=getattr(torch, dtype), device=device)
    return load_decoder(model, dtype=getattr(torch, dtype), device=device, offload=settings.offload)


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    work: str | Path | None = None,
    keep_work: bool = False,
    overwrite: bool = False,
    evaluation: str | Path | None = None,
    recipe: str | Path | None = None,
    progress: Progress | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    ranks: Ranks = ALONE,
    **settings: Any,
) -> dict[str, Any]:
    """Quantize the linears of ``model`` (directory or hub name) and write a checkpoint to ``out``; returns its record.

    work: where finished pieces are kept until the checkpoint is written, ``out`` + ".work" by default; run the same
    call again after an interruption to resume to identical bytes.  keep_work: keep it afterwards.
    evaluation: held-out text; perplexity, KL and top-1 agreement before and after go into the model card.
    recipe: a TOML file of settings.  settings: the fields of ``Settings``; they win over the recipe.
    on_plan: called with the plan before work starts.  ranks: the processes that share the work (``bakron.run.ranks``), all
    of which make this call; ``on_plan`` is called on the first.

    Raises the named errors of ``bakron.errors``, before work starts where it can be known.
    """
    out = Path(out)
    paths = {name: _as_text(settings.get(name)) for name in ("calibration", "hessians")}
    chosen = Settings.load(recipe, **{**settings, **paths})
    require_free_output(out, overwrite)
    work = Path(work) if work else out.with_name(out.name + ".work")
    job = Job(str(model), chosen, work, progress or Silent(), ranks=ranks)
    check_output(job.source, out, overwrite)
    held_out = Evaluation.of(job.decoder, evaluation) if evaluation and ranks.first else None
    ranks.from_first(lambda: announce(job, on_plan, out, keeps_original=held_out is not None))
    with held(work, ranks, keep_work):
        if ranks.from_first((work / "solved").exists):
            job.solved  # noqa: B018 - refuses layers solved with other settings before anything is collected
        before = held_out.reference(job.original(), job.progress) if held_out else None
        job.collect()
        job.solve()

        def finish() -> dict[str, Any]:
            quality = None
            if held_out and before:
                quality = held_out.facts(before[1], held_out.of_model(job.decoder, before[0], job.progress))
            job.export(out, quality, overwrite)
            return json.loads((out / REPORT).read_text())

        return ranks.from_first(finish)


def announce(
    job: Job, on_plan: Callable[[Plan], None] | None, out: Path | None = None, keeps_original: bool = False
) -> None:
    """Make the plan of ``job``, show it to ``on_plan``, and raise DiskSpaceError unless there is room for it, and in ``out``.

    keeps_original: whether a model that was transformed is there in its original form, too.
    """
    plan = job.plan()
    if keeps_original and job.settings.transforms:
        plan = dataclasses.replace(
            plan, model_whole=2 * plan.model_whole, model_one_block=2 * plan.model_one_block
        )
    if on_plan:
        on_plan(plan)
    require_space(job.work, plan.disk, "the work directory")
    if out:
        require_space(out, plan.output, "the checkpoint")


def require_free_output(out: Path, overwrite: bool) -> None:
    """Raise OutputExistsError when ``out`` holds anything and may not be overwritten."""
    if out.exists() and not overwrite and (not out.is_dir() or any(out.iterdir())):
        raise OutputExistsError(f"{out}: is not empty. Choose another output directory, or pass overwrite.")


def _as_text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)
