"""Claims: memory and disk in ``benchmarks/scaling.py`` are those of a run's own plan; its counts are those of its formulas.

Kinds: oracle.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_decoder

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from scaling import MODELS, Linear, Model, attention, busiest, disk, memory, mlp, operations, output  # noqa: E402

from bakron.run.pipeline import Job  # noqa: E402
from bakron.run.ranks import Ranks  # noqa: E402
from bakron.run.settings import Settings  # noqa: E402


class Planned(Ranks):
    """One of three, that only plans."""

    size = 3


@pytest.mark.parametrize("ranks", [Ranks(), Planned()])
def test_memory_and_disk_are_those_of_a_plan(tmp_path: Path, ranks: Ranks) -> None:
    path = tiny_decoder("llama", tmp_path / "m", tokenizer=True, tied=True, vocab_size=272)
    (tmp_path / "text.txt").write_text("the quick brown fox " * 30)
    settings = Settings(
        calibration=str(tmp_path / "text.txt"), n_sequences=5, sequence_length=40, group_size=32
    )
    plan = Job(str(path), settings, tmp_path / "work", ranks=ranks).plan()
    norms = 32 * 5
    shapes = Model("tiny", [(2, attention(32, 16) + mlp(32, 64))], 32, 272, 272 * 32 + norms, itemsize=4)
    seen = memory(shapes, 5 * 40, 40, ranks.size)
    assert seen["model"] == plan.model
    assert seen["factors"] == plan.factors
    assert seen["states"] + seen["gathered"] == plan.boundaries
    assert seen["activations"] == plan.activations
    assert disk(shapes, 5 * 40) == plan.disk


def test_sizes_of_the_models_are_those_of_their_names() -> None:
    sizes = [(model.quantized + model.others) / 1e9 for model in MODELS]
    assert sizes == pytest.approx([8.03, 70.6, 400.7], rel=2e-3)
    assert output(MODELS[0], 4, 64) == pytest.approx(6.98e9 * 4.25 / 8 + 2 * 1.05e9, rel=2e-3)


def test_operations_of_a_single_linear_and_of_an_expert() -> None:
    one = Model("one", [(1, [Linear(3, 5, writes=True)])], width=5, vocabulary=7, others=35)
    counted = operations(one, tokens=10, sequences=2)
    assert counted["half"] == 10 * (2 * 7 * 15 + 4 * 7 * 5)
    assert counted["single"] == 10 * 2 * (15 + 25 + 15) + 2 * 2 * 3 * 3 * 5
    assert counted["sweeps"] == 3 * 5 * 8
    assert counted["double"] == 3 * 5 * 8 + 27 + 125
    expert = dataclasses.replace(one, blocks=[(1, [Linear(3, 5, writes=True, tokens=0.5)])])
    halved = operations(expert, tokens=20, sequences=2)
    assert halved["half"] == counted["half"] + 10 * 4 * 7 * 5, "all tokens go through the head"
    assert halved["single"] == counted["single"]


def test_the_busiest_rank_has_all_of_one_and_a_third_of_three_equal_ones() -> None:
    three = Model("three", [(2, [Linear(4, 4)] * 3)], 4, 7, 0)
    assert [busiest(three, n) for n in (1, 2, 3, 8)] == pytest.approx([1, 2 / 3, 1 / 3, 1 / 3])
