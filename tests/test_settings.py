"""Claims about settings: the same names everywhere, every wrong value is named, and what follows from them is right.

Kinds: behaviour.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from bakron.core.layers import Scheme
from bakron.errors import ConfigError
from bakron.run.settings import Settings


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return path

    return write


def test_a_recipe_sets_fields_and_keywords_win(recipe: Any) -> None:
    path = recipe(
        """
        bits = 3
        group_size = -1
        symmetric = false
        method = "gptq"
        aim = 1
        percdamp_in = 0.02
        skip = ["layers\\\\.0\\\\.", "down_proj"]
        calibration = "text.txt"
        """
    )
    settings = Settings.load(path, bits=2, seed=None)
    assert settings == Settings(
        bits=2,
        group_size=-1,
        symmetric=False,
        method="gptq",
        aim=1.0,
        percdamp_in=0.02,
        skip=(r"layers\.0\.", "down_proj"),
        calibration="text.txt",
    )


def test_every_field_may_stand_in_a_recipe(recipe: Any) -> None:
    given = {
        **dataclasses.asdict(Settings()),
        "estimator": "kfac",
        "aim": 0.25,
        "calibration": "a.txt",
        "skip": ["x"],
        "layers": [],
    }
    del given["hessians"]  # which goes with static inputs only
    lines = [
        f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
        for key, value in given.items()
    ]
    loaded = Settings.load(recipe("\n".join(lines)))
    assert dataclasses.asdict(loaded) == {**given, "skip": ("x",), "layers": (), "hessians": None}
    assert Settings.load(recipe('hessians = "a"\ninputs = "static"')).hessians == "a"


def test_without_anything_the_defaults_hold() -> None:
    assert Settings.load() == Settings()


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [("bit", "bits"), ("groupsize", "group_size"), ("metod", "method"), ("percdamp", "percdamp_in")],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(recipe: Any, key: str, suggestion: str) -> None:
    for load in (lambda: Settings.load(**{key: 3}), lambda: Settings.load(recipe(f"{key} = 3"))):
        with pytest.raises(ConfigError, match=rf"'{key}'.*did you mean '{suggestion}"):
            load()


def test_an_unknown_name_like_no_other_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="'zzzz'"):
        Settings.load(zzzz=1)


@pytest.mark.parametrize(
    ("key", "value", "seen"),
    [
        ("bits", "3", "str"),
        ("bits", 3.0, "float"),
        ("bits", True, "bool"),
        ("symmetric", 1, "int"),
        ("symmetric", "yes", "str"),
        ("percdamp_in", "0.1", "str"),
        ("percdamp_in", True, "bool"),
        ("aim", "half", "str"),
        ("method", 4, "int"),
        ("calibration", 4, "int"),
        ("seed", 0.5, "float"),
        ("skip", [3], "int|list|tuple"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(key: str, value: Any, seen: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: .*({seen})"):
        Settings.load(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bits", 1),
        ("bits", 9),
        ("group_size", 0),
        ("group_size", -2),
        ("scale", "max"),
        ("method", "awq"),
        ("estimator", "fisher"),
        ("labels", "text"),
        ("inputs", "both"),
        ("aim", -0.1),
        ("aim", 1.1),
        ("aim", float("nan")),
        ("percdamp_aim", -0.01),
        ("percdamp_in", -0.01),
        ("percdamp_in", float("inf")),
        ("percdamp_out", float("nan")),
        ("shrink_out", 1.5),
        ("shrink_out", -0.5),
        ("shrink_out", float("nan")),
        ("act_order", "rows"),
        ("kernel", "cuda-fast"),
        ("n_sequences", 0),
        ("label_samples", 0),
        ("sequence_length", 0),
        ("sampling", "random"),
        ("dtype", "int8"),
        ("skip", "("),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name_and_value(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        Settings.load(**{key: value})
    assert key in str(raised.value) and str(value) in str(raised.value)


def test_rtn_with_an_estimator_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match=r"rtn.*shampoo"):
        Settings(method="rtn", estimator="shampoo")
    assert Settings(method="rtn", estimator="identity").needs_data is False


def test_damping_of_H_out_alone_may_be_chosen_for_each_linear(recipe: Any) -> None:
    assert Settings().percdamp_out == "auto"
    assert Settings.load(recipe('percdamp_out = "auto"')) == Settings()
    for key, value in (("percdamp_in", "auto"), ("percdamp_out", "automatic"), ("shrink_out", "auto")):
        with pytest.raises(ConfigError, match=f"{key}: '{value}' is a str"):
            Settings.load(**{key: value})


def test_the_text_has_one_label_for_each_token() -> None:
    with pytest.raises(
        ConfigError, match=r"label_samples: 2 .* labels data has none to draw.*Choose labels model"
    ):
        Settings(labels="data", label_samples=2)
    assert Settings(label_samples=2).labels == "model"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "inputs must be static, seen sequential"),
        ({"inputs": "static", "method": "rtn"}, "method rtn uses none"),
        ({"inputs": "static", "estimator": "kfac"}, "estimator 'kfac' would collect others"),
    ],
)
def test_given_hessians_with_other_sources_are_a_contradiction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(hessians="factors", **options)


def test_bad_recipes_are_named(tmp_path: Path, recipe: Any) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml.*no such file"):
        Settings.load(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"recipe\.toml.*not valid TOML.*line 1"):
        Settings.load(recipe("bits == 3"))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Settings.load(tmp_path)
    with pytest.raises(ConfigError, match=r"quantization"):
        Settings.load(recipe("[quantization]\nbits = 3"))


@pytest.mark.parametrize(
    ("options", "estimator", "sequential", "needs_data"),
    [
        ({}, "shampoo", True, True),
        ({"method": "gptq"}, "gram", True, True),
        ({"method": "rtn"}, "identity", False, False),
        ({"estimator": "kfac"}, "kfac", True, True),
        ({"inputs": "static"}, "shampoo", False, True),
        ({"method": "gptq", "estimator": "identity"}, "identity", False, False),
        ({"hessians": "factors", "inputs": "static"}, "identity", False, False),
    ],
)
def test_what_follows_from_the_method(
    options: dict[str, Any], estimator: str, sequential: bool, needs_data: bool
) -> None:
    settings = Settings.load(**options)
    assert (settings.estimator_name, settings.sequential, settings.needs_data) == (
        estimator,
        sequential,
        needs_data,
    )


def test_the_aim_in_force() -> None:
    assert 0 < Settings().aim_used <= 1
    assert Settings(aim=0.25).aim_used == 0.25
    assert Settings(method="gptq").aim_used == 0
    assert Settings(method="gptq", aim=0.25).aim_used == 0.25
    assert Settings(inputs="static", aim=0.25).aim_used == 0
    assert Settings(method="rtn", aim=0.25).aim_used == 0


def test_scheme_and_quantizer_are_those_of_the_settings() -> None:
    settings = Settings(bits=5, group_size=32, symmetric=False, scale="minmax")
    assert settings.scheme == Scheme(5, 32, False)
    quantizer = settings.quantizer(torch.bfloat16)
    seen = (quantizer.bits, quantizer.group_size, quantizer.symmetric, quantizer.scale, quantizer.scale_dtype)
    assert seen == (5, 32, False, "minmax", torch.bfloat16)


def test_weights_in_files_are_not_transformed() -> None:
    with pytest.raises(
        ConfigError, match=r"offload: disk leaves .* transform rotate changes .*bakron transform"
    ):
        Settings(transform="rotate", offload="disk")
