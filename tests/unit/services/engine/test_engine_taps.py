"""Recording of hidden states changes no logit.

`test_engine_exactness.py` compares the states of every architecture with plain forwards.
"""

from pathlib import Path

import pytest
import torch

from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.engine.native.runner import NativeRunner
from tests.support.engine_helpers import random_tokens, tiny_model

LAST = 3
LAYERS = (2, LAST, 0, 1, 2)
TREE = (-1, -1, 0, 0, 1, 2, 4, 5, 6, 8)


def native(directory: Path) -> Engine:
    engine = load_engine(str(directory))
    assert isinstance(engine.runner, NativeRunner)
    return engine


def general(directory: Path) -> Engine:
    return load_engine(str(directory), engine="transformers")


def fixed(directory: Path) -> Engine:
    return load_engine(str(directory), deterministic=True)


BUILDS = (native, general, fixed)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("models"), head_dim=16)


@pytest.mark.parametrize("build", BUILDS)
def test_logits_have_the_same_bits_with_taps(build, llama):
    tapped, plain = build(llama), build(llama)
    tapped.tap(LAYERS)
    text = random_tokens(60, 1)
    for feeds in (
        [SequenceInput("a", 0, text[:40], 40), SequenceInput("b", 0, text[:5], 1)],
        [SequenceInput("a", 40, text[40:41], 1)],
        [SequenceInput("a", 41, text[41:51], 10, TREE), SequenceInput("b", 5, text[5:9], 0)],
    ):
        for got, expected in zip(tapped.step(feeds), plain.step(feeds), strict=True):
            assert torch.equal(got, expected)
        assert len(tapped.taps) == len(feeds)
        assert plain.taps == []
    tapped.tap([])
    feed = [SequenceInput("b", 9, text[:3], 3)]
    assert torch.equal(tapped.step(feed)[0], plain.step(feed)[0])
    assert tapped.taps == []
