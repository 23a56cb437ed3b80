"""Collections over different data of one model, merged into the factors of all their data (docs/hessians.md)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

from torch import Tensor

from bakron.core.packed import pack
from bakron.errors import ConfigError, OutputExistsError, ShapeError
from bakron.estimators import get_estimator, number_of_passes
from bakron.run.factors import COUNTS, LAYOUT, SIDES, Factors
from bakron.run.progress import Progress, Silent, stage
from bakron.run.store import require_space, write_tensors

SAME = ("model", "estimator", "labels", "label_samples")
MAY_LACK = ("labels", "label_samples")  # without gradients there are none, and one sample is not written


def merge_hessians(
    out: str | Path, directories: Sequence[str | Path], *, progress: Progress | None = None
) -> dict[str, Any]:
    """Write to ``out`` the means over all data of ``directories``; returns what they are of, and the counts.

    Each factor is Σ n H / Σ n, n being tokens for estimators that divide by tokens, and else sequences.  A factor that
    some directories have and others lack, as of an expert to which no token was routed, is zero in these.
    Token weights are left out: they belong to the states of the very sequences of one collection.
    ``out`` appears whole or not at all.

    Raises ConfigError (other model, estimator, labels or number of labels, the same data twice, factors that cannot be
    added up), ShapeError, OutputExistsError, DiskSpaceError.
    """
    out, progress = Path(out), progress or Silent()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputExistsError(f"{out}: is not empty. Choose another directory for the merged factors.")
    if len(directories) < 2:
        raise ConfigError(f"merge: expected at least two directories of factors, seen {len(directories)}.")
    collections = [Factors(directory) for directory in directories]
    facts = _common_facts(collections)
    per_token = get_estimator(facts["estimator"]).per_token
    names = _common_files(collections)
    _require_same_kind(collections)
    _require_other_data(collections)
    require_space(out, sum(file.stat().st_size for file in collections[0].files), "the merged factors")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with stage(progress, f"merge {len(collections)} collections", len(names)):
        for name in names:
            of_file = [of.metadata[of.path / name] for of in collections]
            counts = {key: sum(metadata[key] for metadata in of_file) for key in COUNTS}
            key = "n_tokens" if per_token else "n_sequences"
            shares = [metadata[key] / counts[key] for metadata in of_file]
            data = [fingerprint for metadata in of_file for fingerprint in metadata["data"]]
            shared = {k: v for metadata in of_file for k, v in metadata.get("shared_H_in", {}).items()}
            metadata = {"layout": LAYOUT, **counts, **facts, "data": data, "shared_H_in": shared}
            metadata |= _squares(of_file, shares)
            write_tensors(partial / name, _means(collections, name, shares), metadata)
            progress.advance()
    if out.exists():
        out.rmdir()  # it is empty
    partial.rename(out)
    return {**facts, "n_linears": len(collections[0].linears), **counts}


def _means(collections: Sequence[Factors], name: str, shares: Sequence[float]) -> dict[str, Tensor]:
    """Σ share · H of every factor in the files called ``name``, packed; sums in float64."""
    keys = {key: None for of in collections for key in of.keys(of.path / name)}
    sums: dict[str, Tensor] = {}
    for linear, side in keys:
        total = None
        for of, share in zip(collections, shares, strict=True):
            H = of.load(linear, side)
            if H is not None:
                total = share * H.double() if total is None else total.add_(H.double(), alpha=share)
        assert total is not None
        sums[f"{linear}.{side}"] = pack(total)
    return sums


def _squares(of_file: Sequence[dict[str, Any]], shares: Sequence[float]) -> dict[str, dict[str, float]]:
    """Σ share² · squares_out of every linear, the sum of its terms' squares over all data; nothing if a file lacks them."""
    if any("squares_out" not in metadata for metadata in of_file):
        return {}
    summed: dict[str, float] = {}
    for metadata, share in zip(of_file, shares, strict=True):
        for name, value in metadata["squares_out"].items():
            summed[name] = summed.get(name, 0.0) + share**2 * value
    return {"squares_out": summed}


def _common_facts(collections: Sequence[Factors]) -> dict[str, Any]:
    """What all ``collections`` say of themselves. Raises ConfigError naming what differs."""
    facts: dict[str, Any] = {"version": version("bakron")}
    first = collections[0]
    for key in SAME:
        said = [of.fact(key) for of in collections]
        if key not in MAY_LACK and None in said:
            of = collections[said.index(None)]
            raise ConfigError(
                f"{of.path}: its metadata has no {key}, which must be known to merge. Add it (docs/hessians.md)."
            )
        for of, value in zip(collections, said, strict=True):
            if value != said[0]:
                raise ConfigError(
                    f"{key} is {said[0]!r} in {first.path} and {value!r} in {of.path}: merge only what was collected "
                    f"with the same {key}."
                )
        if said[0] is not None:
            facts[key] = said[0]
    if number_of_passes(get_estimator(facts["estimator"])) > 1:
        raise ConfigError(
            f"{first.path}: estimator {facts['estimator']} takes several passes, each with the factors of the one "
            "before, so collections do not add up. Collect once over all the text, or use shampoo or kfac."
        )
    return facts


def _common_files(collections: Sequence[Factors]) -> list[str]:
    """The file names, which must be the same everywhere and say what is needed. Raises ConfigError."""
    names = {file.name for file in collections[0].files}
    for of in collections:
        other = {file.name for file in of.files}
        if other != names:
            odd = min(other ^ names)
            lacking = of if odd not in other else collections[0]
            raise ConfigError(
                f"{lacking.path}: has no {odd}, which others have. Finish its collection first."
            )
        for file in of.files:
            for key in (*COUNTS, "data"):
                if key not in of.metadata[file]:
                    raise ConfigError(
                        f"{file}: its metadata has no {key}, which must be known to merge. Add it (docs/hessians.md)."
                    )
    return sorted(names)


def _require_same_kind(collections: Sequence[Factors]) -> None:
    """Raise unless all have the same sides and sizes."""
    first = collections[0]
    for of in collections[1:]:
        for side in SIDES:
            if of.holds(side) != first.holds(side):
                lacking, having = (first, of) if of.holds(side) else (of, first)
                raise ConfigError(
                    f"{lacking.path}: has no {side}, which {having.path} has. Collect all of them with the same inputs: "
                    "static ones have H_in, sequential ones have not."
                )
            for name in of.linears:
                sizes = first.size(name, side), of.size(name, side)
                if None not in sizes and sizes[0] != sizes[1]:
                    raise ShapeError(
                        f"{of.path}: {name}: {side} has size {sizes[1]}, expected {sizes[0]} as in {first.path}."
                    )


def _require_other_data(collections: Sequence[Factors]) -> None:
    """Raise ConfigError when two collections have a sequence in common, which would count twice."""
    seen = [{one for metadata in of.metadata.values() for one in metadata["data"]} for of in collections]
    for (a, of_a), (b, of_b) in combinations(zip(seen, collections, strict=True), 2):
        if a & b:
            raise ConfigError(
                f"{of_a.path} and {of_b.path} have {len(a & b)} of {len(b)} calibration sequences in common, which would "
                "count twice. Collect over other text."
            )
