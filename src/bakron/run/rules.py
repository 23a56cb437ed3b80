"""Exceptions to a run's bits, group size and symmetry, for the linears whose name matches a regular expression."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bakron.core.layers import LinearSpec, Scheme
from bakron.errors import ConfigError


@dataclass(frozen=True)
class LayerRule:
    """A table ``[[layers]]`` of a recipe: what differs in linears where ``pattern`` is found; None is no difference.

    pattern: a regular expression, searched in the linear's name like those of ``skip``; the name itself is one.
    Raises ConfigError, naming the pattern, for values of a wrong type and for a rule that says nothing.
    """

    pattern: str
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None

    def __post_init__(self) -> None:
        where = f"layers: the rule for {self.pattern!r}"
        try:
            re.compile(self.pattern)
        except (re.error, TypeError) as error:
            raise ConfigError(f"{where}: not a regular expression: {error}.") from error
        for name, wanted in (("bits", int), ("group_size", int), ("symmetric", bool)):
            value = getattr(self, name)
            if value is not None and type(value) is not wanted:
                raise ConfigError(
                    f"{where}: {name}: {value!r} is a {type(value).__name__}, expected {wanted.__name__}."
                )
        if not self.changes:
            raise ConfigError(f"{where}: says nothing; give bits, group_size or symmetric.")

    @property
    def changes(self) -> dict[str, int | bool]:
        """What the rule says, by setting."""
        values = {name: getattr(self, name) for name in ("bits", "group_size", "symmetric")}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def of(cls, table: LayerRule | Mapping[str, Any]) -> LayerRule:
        """A rule from a recipe's table. Raises ConfigError, naming what is missing, unknown or wrong."""
        if isinstance(table, LayerRule):
            return table
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(table, Mapping) or "pattern" not in table:
            raise ConfigError(
                f"layers: expected tables with a pattern and {', '.join(known[1:])}, seen {table!r}."
            )
        for key in table:
            if key not in known:
                close = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {close[0]!r}?" if close else "."
                raise ConfigError(f"layers: the rule for {table['pattern']!r}: unknown setting {key!r}{hint}")
        return cls(**table)


def scheme_of(name: str, default: Scheme, rules: Sequence[LayerRule]) -> Scheme:
    """The scheme of the linear called ``name``: ``default``, changed by every rule that matches, later ones last."""
    for rule in rules:
        if re.search(rule.pattern, name):
            default = dataclasses.replace(default, **rule.changes)
    return default


def bits_text(schemes: Iterable[Scheme]) -> str:
    """The bits of ``schemes`` for a title: ``4``, or ``2/3/4``."""
    return "/".join(str(bits) for bits in sorted({scheme.bits for scheme in schemes}))


def check_rules(
    linears: Sequence[LinearSpec],
    fused: Sequence[Sequence[str]],
    schemes: Mapping[str, Scheme],
    rules: Sequence[LayerRule],
) -> None:
    """Raise ConfigError, naming linears, when a rule matches none, or ``fused`` ones would get different ``schemes``.

    linears: all that there are, skipped ones too.  fused: names that inference engines join into one matrix.
    """
    for rule in rules:
        if not any(re.search(rule.pattern, spec.name) for spec in linears):
            raise ConfigError(
                f"layers: the pattern {rule.pattern!r} is found in the name of no linear of the model; "
                f"they are called like {linears[0].name}."
            )
    for names in fused:
        chosen = {name: schemes[name] for name in names if name in schemes}
        if len(set(chosen.values())) > 1:
            listed = "\n".join(f"  {name}: {scheme}" for name, scheme in chosen.items())
            raise ConfigError(
                "layers: inference engines join these linears into one matrix, so they must have the same bits, "
                f"group_size and symmetric:\n{listed}\nChange the patterns so that they match all or none of them."
            )
