"""The variants of a comparison from short texts: ``gptq``, ``bakron:inputs=static:aim=0.3``, each at several bits."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bakron.errors import ConfigError
from bakron.run.settings import Settings


def make_variants(
    methods: Sequence[str], bits: Sequence[int], recipe: str | Path | None = None, **settings: Any
) -> dict[str, Settings]:
    """Label → settings, for each of ``bits`` (none: the recipe's) and each method with its own changes.

    methods: texts ``METHOD`` or ``METHOD:setting=value:…``.  settings: for all; None values are ignored.  An estimator
    given for all is not given to ``rtn``, which has none.  The setting ``recipe`` is a recipe of the method's own, with its
    own bits.  Raises ConfigError.
    """
    variants: dict[str, Settings] = {}
    for i, b in enumerate(bits or [None]):
        for text in methods:
            method, changed = parse_variant(text)
            own = {**settings, **changed}
            own_recipe = own.pop("recipe", None)
            if own_recipe and i:
                continue  # made already: its bits are the recipe's
            if method == "rtn":
                own["estimator"] = "identity"
            given = None if own_recipe else b
            chosen = Settings.load(own_recipe or recipe, **{**own, "method": method, "bits": given})
            if given is not None and any(rule.bits for rule in chosen.layers):
                raise ConfigError(
                    f"compare: bits {given} is given, but [[layers]] of {recipe} say the bits of each layer. Give the "
                    f"recipe to one method, {method}:recipe={recipe}, or leave bits out."
                )
            bit = "mixed" if any(rule.bits for rule in chosen.layers) else f"{chosen.bits} bit"
            label = " ".join([method, bit, *(_label(change) for change in text.strip().split(":")[1:])])
            if label in variants:
                raise ConfigError(f"compare: {label!r} is listed twice.")
            variants[label] = chosen
    return variants


def parse_variant(text: str) -> tuple[str, dict[str, Any]]:
    """The method and the settings of ``METHOD:setting=value:…``. Raises ConfigError.

    >>> parse_variant("bakron:aim=0.5:inputs=static")
    ('bakron', {'aim': 0.5, 'inputs': 'static'})
    """
    method, *changes = text.strip().split(":")
    return method, dict(_change(change, text) for change in changes)


def _label(change: str) -> str:
    """``change`` as it stands in a label, which also names a directory: of a recipe's path the name."""
    name, _, value = change.partition("=")
    return f"{name}={Path(value).name}" if name.strip() == "recipe" else change


def _change(text: str, method: str) -> tuple[str, Any]:
    """``name=value`` as a setting, the value as TOML would read it, or else as text."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or name in ("method", "bits"):
        raise ConfigError(f"{method!r}: expected METHOD:setting=value, seen {text!r}.")
    name = name.replace("-", "_")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value
