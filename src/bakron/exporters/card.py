"""The model card: README.md of an exported checkpoint, made from a plain dict of facts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

NOT_MEASURED = "not measured"


def model_card(facts: Mapping[str, Any]) -> str:
    """The Markdown text; every fact is optional, and what is missing is said to be unknown, never left out silently.

    facts: title, base_model (str), transform (str), method (str), format (str), bits, group_size, symmetric, or in place
    of the last two schemes (a mapping of bits, group_size, symmetric, linears, weights for each), bits_per_weight (scales
    included), share_quantized (0..1, of all parameters), calibration (mapping: source, n_sequences, sequence_length,
    fingerprint), quality (mapping: perplexity_before, perplexity_after, kl, kl_p99, top1, data), usage (Python lines
    that load the checkpoint at ``path``), version (of bakron), settings (mapping, printed as JSON).

    >>> "# tiny" in model_card({"title": "tiny"}).splitlines()
    True
    """
    title = str(facts.get("title", "Quantized model"))
    parts = [
        _front_matter(facts),
        f"# {title}",
        f"Weights quantized after training with bakron {facts.get('version', '')}".rstrip() + ".",
        _table("Quantization", _scheme_rows(facts)),
        *([_mixed(facts["schemes"])] if facts.get("schemes") else []),
        _table("Calibration", _rows(facts.get("calibration"), CALIBRATION)),
        _table("Quality, against the original model", _rows(facts.get("quality"), QUALITY)),
    ]
    if facts.get("usage"):
        parts.append(f"## How to load it\n\n```python\n{facts['usage']}\n```")
    if facts.get("settings"):
        text = json.dumps(facts["settings"], indent=2, sort_keys=True, default=str)
        parts.append(f"## Settings\n\n```json\n{text}\n```")
    return "\n\n".join(parts) + "\n"


CALIBRATION = {
    "source": "text",
    "n_sequences": "sequences",
    "sequence_length": "tokens per sequence",
    "fingerprint": "fingerprint (SHA-256)",
}
QUALITY = {
    "data": "text",
    "perplexity_before": "perplexity before",
    "perplexity_after": "perplexity after",
    "kl": "KL divergence, mean (nats per token)",
    "kl_p99": "KL divergence, 99th percentile",
    "top1": "top-1 agreement",
}


def _front_matter(facts: Mapping[str, Any]) -> str:
    base = facts.get("base_model")
    lines = ["library_name: transformers", "tags:", "- bakron", "- quantized"]
    return "\n".join(["---", *([f"base_model: {json.dumps(str(base))}"] if base else []), *lines, "---"])


def _scheme_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    several = "see below" if facts.get("schemes") else None
    return [
        ("original", _text(facts.get("base_model"))),
        ("transform of the weights before", _text(facts.get("transform"))),
        ("method", _text(facts.get("method"))),
        ("format", _text(facts.get("format"))),
        ("bits per code", _text(facts.get("bits"))),
        ("group size", several or _group(facts.get("group_size"))),
        ("grid", several or _grid(facts.get("symmetric"))),
        ("bits per weight, scales included", _text(facts.get("bits_per_weight"))),
        ("share of parameters quantized", _text(facts.get("share_quantized"))),
    ]


def _group(group_size: int | None) -> str:
    return "whole row" if group_size == -1 else _text(group_size)


def _grid(symmetric: bool | None) -> str:
    return _text({True: "symmetric", False: "asymmetric"}.get(symmetric) if symmetric is not None else None)


def _mixed(schemes: Sequence[Mapping[str, Any]]) -> str:
    """A table of how many linears have which bits; which ones is in the settings below."""
    lines = ["## Bits", "", "| bits | group size | grid | linears | weights |", "|---|---|---|---|---|"]
    for row in schemes:
        cells = [
            row["bits"],
            _group(row["group_size"]),
            _grid(row["symmetric"]),
            row["linears"],
            row["weights"],
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _rows(section: Mapping[str, Any] | None, labels: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(label, _text((section or {}).get(key))) for key, label in labels.items()]


def _table(heading: str, rows: list[tuple[str, str]]) -> str:
    return "\n".join(
        [f"## {heading}", "", "| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)]
    )


def _text(value: Any) -> str:
    if value is None:
        return NOT_MEASURED
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
