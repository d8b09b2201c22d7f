"""Figures of the benchmark of quantised drafts."""

from pathlib import Path

import pytest

from benchmarks.draft_weights import TEMPERATURES, agreement, times, weight_bytes
from services.engine.loader import load_engine
from tests.support.engine_helpers import random_tokens, tiny_model


@pytest.fixture
def drafts(tmp_path: Path):
    directory = str(tiny_model("llama", tmp_path, bfloat16=True))
    return {weights: load_engine(directory, weights=weights) for weights in ("auto", "int4")}


def test_agreement_is_one_for_the_target_itself_and_less_for_others(drafts, tmp_path):
    asked = [random_tokens(8, seed) for seed in range(2)]
    other = load_engine(str(tiny_model("llama", tmp_path, seed=1)))
    found = agreement(drafts["auto"], {**drafts, "other": other}, asked, num_tokens=20, num_seeds=2)
    assert found["auto"] == dict.fromkeys(TEMPERATURES, 1.0)
    for temperature in TEMPERATURES:
        assert found["other"][temperature] < found["int4"][temperature] <= 1.0
    assert found["int4"][1.0] < 1.0


def test_times_are_per_forward_of_each_shape_and_turn(drafts):
    taken = times(drafts, context=30, turns=3)
    assert taken.keys() == drafts.keys()
    assert all(len(own) == 3 and min(own) > 0 for shapes in taken.values() for own in shapes.values())
    assert weight_bytes(drafts["int4"]) < weight_bytes(drafts["auto"])
