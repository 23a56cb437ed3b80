"""All settings of a run in one validated dataclass, the same names in Python, on the command line and in a TOML recipe."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from bakron.api import PERCDAMP_IN
from bakron.core.layers import Scheme
from bakron.core.solution import ActOrder
from bakron.core.transforms import TRANSFORMS
from bakron.errors import ConfigError, require_one_of
from bakron.estimators import get_estimator
from bakron.kernels import kernel_names
from bakron.quantizers.integer import Integer, Scale
from bakron.run.rules import LayerRule

Method = Literal["bakron", "gptq", "rtn"]
_ESTIMATOR_OF = {"bakron": "shampoo", "gptq": "gram", "rtn": "identity"}
Auto = Literal["auto"]
AIM = 1.0  # these two are measured: docs/experiments.md
PERCDAMP_AIM = 1.0


@dataclass(frozen=True)
class Settings:
    """What to do to a model; see the README for the meaning of each.

    method: "bakron" rounds in the two-sided metric, "gptq" with H_out = I, "rtn" without any Hessian.
    estimator: where the Hessians come from; None is the method's own (shampoo, gram, identity).
    labels: "model" draws those of the gradients from the model's own distribution (the true Fisher matrix), "data" takes
    the text's next tokens (the empirical one).
    label_samples: labels drawn for each token, each with a backward pass of its own; only with labels "model".
    inputs: "sequential" takes H_in from the already quantized prefix, "static" from the original model.
    hessians: a directory of factors (docs/hessians.md) to solve with instead of collecting any; needs static inputs.
    aim: how far sequential layers that write to the hidden state move towards undoing its drift, 0 … 1; None is 1 for
    bakron and 0 for gptq.
    percdamp_aim: damping of that move, relative to each input's own size; more follows less of the noise.
    percdamp_in, percdamp_out: damping of either factor in multiples of its mean diagonal.  percdamp_out "auto" chooses it
    for each linear from the spread of H_out between sequences, up to leaving H_out out; 2 where given factors do not tell.
    refine: passes of coordinate descent over a layer's codes after the sweep, at most; scales follow if they are "hessian".
    tune: passes over the calibration sequences in which, after the solve, all scales follow the gradient of KL(original ‖
    quantized).
    offload: "disk" has the weights of one block at a time in memory; the result has the same bytes.
    skip: regular expressions; linears whose name matches one are left as they are.
    transform: changes of the weights that leave the model's function as it is, joined by "+" (docs/transforms.md).
    layers: other bits, group_size or symmetric for linears by name (``[[layers]]`` in a recipe); a later rule wins.

    Raises ConfigError for values out of range or in contradiction.
    """

    bits: int = 4
    group_size: int = 64
    symmetric: bool = True
    scale: Scale = "hessian"
    method: Method = "bakron"
    estimator: str | None = None
    labels: Literal["model", "data"] = "model"
    label_samples: int = 1
    inputs: Literal["sequential", "static"] = "sequential"
    hessians: str | None = None
    aim: float | None = None
    percdamp_aim: float = PERCDAMP_AIM
    percdamp_in: float = PERCDAMP_IN
    percdamp_out: float | Auto = "auto"
    shrink_out: float = 0.0
    act_order: ActOrder = "both"
    refine: int = 4
    tune: int = 0
    kernel: str = "auto"
    calibration: str | None = None
    n_sequences: int = 128
    sequence_length: int = 2048
    sampling: Literal["pack", "per-sample"] = "pack"
    seed: int = 0
    format: str = "compressed-tensors"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    offload: Literal["none", "disk"] = "none"
    skip: tuple[str, ...] = ()
    transform: str = "none"
    layers: tuple[LayerRule, ...] = ()

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            require_one_of(field, getattr(self, field), allowed)
        if self.refine < 0:
            raise ConfigError(
                f"refine: {self.refine} is negative; 0 leaves the codes as the sweep found them."
            )
        for field in ("n_sequences", "sequence_length", "label_samples"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}: {getattr(self, field)} must be at least 1.")
        if self.label_samples > 1 and self.labels != "model":
            raise ConfigError(
                f"label_samples: {self.label_samples} would be drawn, and labels {self.labels} has none to draw. "
                "Choose labels model, or leave label_samples at 1."
            )
        if self.aim is not None and not 0 <= self.aim <= 1:
            raise ConfigError(
                f"aim: {self.aim} is not between 0 (the layer's own weight) and 1 (the original hidden states)."
            )
        for field in ("percdamp_in", "percdamp_out", "percdamp_aim"):
            value = getattr(self, field)
            if (field, value) != ("percdamp_out", "auto") and not 0 <= value < float("inf"):
                raise ConfigError(f"{field}: {value} must be finite and not negative.")
        if not 0 <= self.shrink_out <= 1:
            raise ConfigError(f"shrink_out: {self.shrink_out} is not between 0 and 1.")
        for pattern in self.skip:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"skip: {pattern!r} is not a regular expression: {error}.") from error
        self.quantizer(None)
        for rule in self.layers:
            try:
                self.quantizer(None, dataclasses.replace(self.scheme, **rule.changes))
            except ConfigError as error:
                raise ConfigError(f"layers: the rule for {rule.pattern!r}: {error}") from error
        for name in self.transforms:
            require_one_of("transform", name, TRANSFORMS)
        if self.transforms and self.offload != "none":
            raise ConfigError(
                f"offload: {self.offload} leaves weights in their files, and transform {self.transform} changes them in "
                "memory. Write the transformed model first (bakron transform MODEL OUT), or leave one of them out."
            )
        get_estimator(self.estimator_name)
        require_one_of("kernel", self.kernel, ("auto", "reference", *kernel_names()))
        if self.method == "rtn" and self.estimator not in (None, "identity"):
            raise ConfigError(
                f"estimator: method rtn uses no Hessian, but estimator {self.estimator!r} was given."
            )
        if self.hessians is not None:
            self._check_hessians()
        self._check_tune()

    def _check_tune(self) -> None:
        """Raise ConfigError for a ``tune`` that cannot be."""
        if self.tune < 0:
            raise ConfigError(f"tune: {self.tune} is negative; 0 leaves the scales as the solve found them.")
        if self.tune and not self.needs_data:
            why = "given factors have none" if self.hessians else f"method {self.method} reads none"
            raise ConfigError(f"tune: {self.tune} passes over calibration text, and {why}. Leave tune out.")
        if self.tune and self.offload != "none":
            raise ConfigError(
                f"tune: every step needs the whole model, and offload {self.offload} has one block in memory. Leave one of "
                "them out."
            )

    def _check_hessians(self) -> None:
        """Raise ConfigError for settings that contradict given factors."""
        given = f"hessians: factors are given ({self.hessians})"
        if self.method == "rtn":
            raise ConfigError(f"{given}, and method rtn uses none. Choose bakron or gptq, or leave them out.")
        if self.estimator is not None:
            raise ConfigError(
                f"{given}, and estimator {self.estimator!r} would collect others. Leave one of them out."
            )
        if self.inputs != "static":
            raise ConfigError(
                f"{given}, whose H_in knows nothing of a quantized prefix, so inputs must be static, seen "
                f"{self.inputs}. Pass inputs static."
            )

    @property
    def estimator_name(self) -> str:
        """The estimator to collect with: the one asked for, or the method's own; none (identity) with given factors."""
        if self.hessians is not None:
            return "identity"
        return self.estimator or _ESTIMATOR_OF[self.method]

    @property
    def sequential(self) -> bool:
        """Whether inputs come from the quantized prefix; without a Hessian there is nothing to take from it."""
        return self.inputs == "sequential" and self.estimator_name != "identity"

    @property
    def aim_used(self) -> float:
        """The aim in force: that of the settings, or the method's own; 0 unless sequential."""
        if not self.sequential:
            return 0.0
        return self.aim if self.aim is not None else (AIM if self.method == "bakron" else 0.0)

    @property
    def needs_data(self) -> bool:
        """Whether the run reads calibration text at all."""
        return self.estimator_name != "identity"

    @property
    def transforms(self) -> tuple[str, ...]:
        """The names in ``transform``, in the order in which they are applied; nothing for "none"."""
        names = set(self.transform.split("+")) if self.transform != "none" else set()
        if "rotate" in names:
            names.add("fold")
        return tuple(sorted(names, key=lambda name: [*TRANSFORMS, name].index(name)))

    @property
    def scheme(self) -> Scheme:
        """How weights are stored, but for the exceptions in ``layers``."""
        return Scheme(self.bits, self.group_size, self.symmetric)

    def quantizer(self, scale_dtype: torch.dtype | None, scheme: Scheme | None = None) -> Integer:
        """The base quantizer of ``scheme`` (default: the settings' own), its scales rounded to ``scale_dtype``."""
        scheme = scheme or self.scheme
        return Integer(scheme.bits, scheme.group_size, scheme.symmetric, self.scale, scale_dtype)

    def as_dict(self) -> dict[str, Any]:
        """All settings by name, as plain data; without ``layers`` when there are none."""
        values = dataclasses.asdict(self)
        values["layers"] = [{"pattern": rule.pattern, **rule.changes} for rule in self.layers]
        if not self.layers:
            del values["layers"]
        return values

    @classmethod
    def load(cls, recipe: str | Path | None = None, **overrides: Any) -> Settings:
        """Settings from a TOML file, if one is given, and ``overrides`` (None values are ignored). Raises ConfigError."""
        values: dict[str, Any] = {}
        if recipe is not None:
            try:
                values = tomllib.loads(Path(recipe).read_text(encoding="utf-8"))
            except FileNotFoundError as error:
                raise ConfigError(f"recipe {recipe}: there is no such file.") from error
            except OSError as error:
                raise ConfigError(f"recipe {recipe}: cannot be read ({error.strerror}).") from error
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"recipe {recipe}: not valid TOML: {error}.") from error
        values |= {key: value for key, value in overrides.items() if value is not None}
        known = {field.name: field for field in dataclasses.fields(cls)}
        for key, value in values.items():
            if key not in known:
                close = difflib.get_close_matches(key, known, 1)
                raise ConfigError(
                    f"unknown setting {key!r}" + (f"; did you mean {close[0]!r}?" if close else ".")
                )
            values[key] = _rules(value) if key == "layers" else _of_type(key, value, str(known[key].type))
        return cls(**values)


_CHOICES = {
    "method": get_args(Method),
    "labels": ("model", "data"),
    "inputs": ("sequential", "static"),
    "scale": get_args(Scale),
    "act_order": get_args(ActOrder),
    "sampling": ("pack", "per-sample"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "offload": ("none", "disk"),
}


def _rules(value: Any) -> tuple[LayerRule, ...]:
    """The rules of a recipe's ``[[layers]]``. Raises ConfigError."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"layers: {value!r} is a {type(value).__name__}, expected a list of tables.")
    return tuple(LayerRule.of(table) for table in value)


def _of_type(key: str, value: Any, annotation: str) -> Any:
    """``value`` if it fits the field's annotation (a whole number passes for a float). Raises ConfigError."""
    wanted: tuple[type, ...] = (str,)
    if annotation.endswith("Auto") and value == "auto":
        return value
    if annotation.startswith("tuple"):
        parts = tuple(value) if isinstance(value, list | tuple) else (value,)
        if all(isinstance(part, str) for part in parts):
            return parts
    elif annotation.startswith(("int", "bool", "float")):
        wanted = {"int": (int,), "bool": (bool,), "flo": (float, int)}[
            annotation[:3] if annotation[0] != "b" else "bool"
        ]
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise ConfigError(f"{key}: {value!r} is a {type(value).__name__}, expected {annotation}.")
    return value
