"""The rows of benchmarks/accuracy.py: whose method, with which options, and on which grids it cannot run.

Each library has a row at its standard setting and, as ``-best``, one with every advantage that it offers at the same bits
per weight: act-order with groups fixed in advance, damping 0.01, scales searched for the least error, inputs taken anew
within a block, more iterations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from bakron.errors import ConfigError, require_one_of
from bakron.run.variants import parse_variant


@dataclass(frozen=True)
class Setting:
    """The grid: integers of ``bits`` with a scale for each ``group_size`` columns, and zero points unless symmetric."""

    bits: int
    group_size: int
    symmetric: bool = True

    @classmethod
    def parse(cls, text: str) -> Setting:
        """BITS:GROUP, with ``:asym`` behind it for zero points.

        >>> Setting.parse("2:32:asym")
        Setting(bits=2, group_size=32, symmetric=False)
        """
        found = re.fullmatch(r"(\d):(\d+)(:asym)?", text)
        if not found:
            raise ValueError(f"{text!r} is not BITS:GROUP or BITS:GROUP:asym, like 4:64 or 2:32:asym")
        return cls(int(found[1]), int(found[2]), not found[3])

    def __str__(self) -> str:
        return f"{self.bits}:{self.group_size}" + ("" if self.symmetric else ":asym")


@dataclass(frozen=True)
class Row:
    """peer: whose script quantizes, ``peers/<peer>_model.py``.  options: what it is given.

    has_data: whether calibration text makes a difference.  slow: takes half a day on two cores, so only when named.
    """

    peer: str
    options: dict[str, Any] = field(default_factory=dict)
    has_data: bool = True
    slow: bool = False


_LEAST_ERROR = {
    "observer": "memoryless_mse",
    "observer_kwargs": {"maxshrink": 0.8, "patience": 80, "norm": 2.0},  # its own limit is 20 % off the range
}

ROWS: dict[str, Row] = {
    "rtn": Row("bakron", {"method": "rtn"}, has_data=False),
    "gptq": Row("bakron", {"method": "gptq"}),
    "bakron": Row("bakron", {"method": "bakron"}),
    "gptqmodel": Row("gptqmodel"),
    "gptqmodel-best": Row(
        "gptqmodel", {"desc_act": True, "static_groups": True, "damp_percent": 0.01, "mse": 2.0}
    ),
    "llmcompressor-gptq": Row("llmcompressor", {"recipe": ["gptq"]}),
    "llmcompressor-gptq-best": Row(
        "llmcompressor", {"recipe": ["gptq"], "weights": _LEAST_ERROR, "parts": True}
    ),
    "llmcompressor-awq": Row("llmcompressor", {"recipe": ["awq"]}),
    "llmcompressor-awq-best": Row(
        "llmcompressor",
        {"recipe": ["awq"], "awq": {"duo_scaling": "both", "n_grid": 40}, "weights": _LEAST_ERROR},
    ),
    "llmcompressor-awq-gptq": Row("llmcompressor", {"recipe": ["awq", "gptq"], "weights": _LEAST_ERROR}),
    "autoround": Row("autoround", {"iters": 200}),
    "autoround-light": Row("autoround", {"iters": 50, "lr": 5e-3}),
    "autoround-best": Row("autoround", {"iters": 1000}, slow=True),
    "hqq": Row("hqq", {"axis": 1}, has_data=False),
    "hqq-columns": Row("hqq", {"axis": 0}, has_data=False),
}


def row_of(name: str) -> Row:
    """The row of this name, or one of bakron with settings of its own: ``bakron:aim=0:refine=0``, as in ``compare``.

    Raises ConfigError.
    """
    if name in ROWS:
        return ROWS[name]
    method, settings = parse_variant(name)
    require_one_of("--rows", method, list(ROWS))
    if ROWS[method].peer != "bakron":
        raise ConfigError(f"--rows: {name}: only bakron's own methods take settings.")
    return Row("bakron", {**ROWS[method].options, **settings}, ROWS[method].has_data)


PEERS = ("gptqmodel", "llmcompressor", "autoround", "hqq")


def unsupported(row: str, setting: Setting) -> str | None:
    """Why this row cannot be measured on this grid, or None."""
    peer = row_of(row).peer
    if peer == "hqq" and setting.symmetric:
        return "HQQ's grids always have a zero point for each group, a float"
    if peer == "hqq" and setting.bits not in (1, 2, 3, 4, 8):
        return f"HQQ packs 1, 2, 3, 4 or 8 bits, not {setting.bits}"
    return None
