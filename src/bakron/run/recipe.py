"""Writing settings as a TOML recipe, and the rules that give chosen linears their schemes."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bakron.core.layers import LinearSpec, Scheme
from bakron.run.rules import LayerRule
from bakron.run.settings import Settings


def recipe_text(settings: Settings, comments: Sequence[str] = ()) -> str:
    """What ``Settings.load`` reads as ``settings``: the bits, whatever else differs from the defaults, and the rules."""
    lines = [f"# {comment}" for comment in comments]
    default = Settings().as_dict()
    values = settings.as_dict()
    rules = values.pop("layers", [])
    for name, value in values.items():
        if value != default[name] or name in ("bits", "group_size"):
            lines.append(f"{name} = {_toml(value)}")
    for rule in rules:
        lines += ["", "[[layers]]", *(f"{name} = {_toml(value)}" for name, value in rule.items())]
    return "\n".join(lines) + "\n"


def rules_for(
    root: str, units: Sequence[Sequence[LinearSpec]], schemes: Mapping[str, Scheme]
) -> tuple[Scheme, list[LayerRule]]:
    """The scheme of most weights, and rules for the others: one for each kind of unit and scheme, with its blocks.

    root: path of the list of blocks.  units: linears of one block that have the same scheme.  schemes: by linear name.
    """
    weights: Counter[Scheme] = Counter()
    blocks: dict[tuple[tuple[str, ...], Scheme], list[int]] = {}
    all_blocks: Counter[tuple[str, ...]] = Counter()
    for unit in units:
        scheme, b = schemes[unit[0].name], unit[0].block
        kind = tuple(spec.name.removeprefix(f"{root}.{b}.") for spec in unit)
        blocks.setdefault((kind, scheme), []).append(b)
        all_blocks[kind] += 1
        weights[scheme] += sum(spec.d_out * spec.d_in for spec in unit)
    base = max(sorted(weights), key=lambda scheme: weights[scheme])
    rules = []
    for (kind, scheme), of in blocks.items():
        if scheme != base:
            where = r"\d+" if len(of) == all_blocks[kind] else _one_of([str(b) for b in of])
            pattern = rf"^{re.escape(root)}\.{where}\.{_one_of([re.escape(name) for name in kind])}$"
            changes = {name: getattr(scheme, name) for name in ("bits", "group_size", "symmetric")}
            rules.append(LayerRule(pattern, **{k: v for k, v in changes.items() if v != getattr(base, k)}))
    return base, rules


def _one_of(patterns: Sequence[str]) -> str:
    return patterns[0] if len(patterns) == 1 else f"({'|'.join(patterns)})"


def _toml(value: Any) -> str:
    """A bool, number, text or list of texts; text with a backslash as a literal where that can be."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        literal = "\\" in value and "'" not in value and value.isprintable()
        return f"'{value}'" if literal else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)
