"""Deterministic mode: bit-identical logits, whatever else is in a step and however tokens are cut."""

import itertools

import pytest
import torch

from gammaray.demo_pair import resolve_model
from services.engine.checks import check_deterministic
from services.engine.core.batch import SequenceInput
from services.engine.core.errors import UnsupportedModelError
from services.engine.loader import load_engine
from tests.support.engine_helpers import LEAN, random_tokens, tiny_model

NUM_POSITIONS = 330
TEXT = random_tokens(NUM_POSITIONS, 7, 2048)


@pytest.fixture(scope="module")
def target():
    return load_engine(resolve_model("demo", "target"), deterministic=True)


@pytest.fixture(scope="module")
def alone(target):
    """Logits token by token: gamma 0, no other session."""
    rows = [target.step([SequenceInput("alone", i, [t], 1)])[0] for i, t in enumerate(TEXT)]
    target.release("alone")
    return torch.cat(rows)


@pytest.mark.parametrize("size", [4, 5, 9, 16, 256, NUM_POSITIONS])
def test_chunks_of_any_size_give_the_bits_of_single_tokens(target, alone, size):
    rows = []
    for start in range(0, len(TEXT), size):
        chunk = TEXT[start : start + size]
        rows += target.step([SequenceInput("chunks", start, chunk, len(chunk))])
    target.release("chunks")
    assert torch.equal(torch.cat(rows), alone)


def test_batch_gives_the_bits_of_being_alone(target, alone):
    """Five ragged sessions at different places of the same text, with another prompt coming in."""
    starts = {f"s{i}": 0 for i in range(5)}
    sizes = itertools.cycle(random_tokens(500, 3, 9))
    while any(start < 200 for start in starts.values()):
        feeds = []
        for name, start in starts.items():
            chunk = TEXT[start : start + 1 + next(sizes)]
            feeds.append(SequenceInput(name, start, chunk, len(chunk)))
        feeds.insert(2, SequenceInput("prompt", 0, TEXT[: 1 + 10 * next(sizes)], 0))
        for feed, got in zip(feeds, target.step(feeds), strict=True):
            if feed.num_logits:
                assert torch.equal(got, alone[feed.start : feed.start + len(feed.token_ids)])
                starts[feed.session_id] = feed.start + len(feed.token_ids)


def test_tree_nodes_give_the_bits_of_a_chain(target, alone):
    target.step([SequenceInput("tree", 0, TEXT[:60], 0)])
    for start in range(60, 90, 6):
        branch = TEXT[start : start + 6]
        nodes = [5, *branch, 6, 7]
        parents = [-1, -1, 1, 2, 3, 4, 5, 0, 2]
        got = target.step([SequenceInput("tree", start, nodes, 9, parents)])[0]
        assert torch.equal(got[1:7], alone[start : start + 6])
        target.keep_path("tree", start, [1, 2, 3, 4, 5, 6])


@pytest.mark.slow
@pytest.mark.parametrize("arch", LEAN)
def test_load_covers_every_architecture_of_the_kernel(arch, tmp_path):
    """Loading compares 80 positions bit for bit; it refuses when one differs."""
    engine = load_engine(str(tiny_model(arch, tmp_path)), deterministic=True)
    assert engine.stats().num_sessions == 0


def test_bits_that_vary_are_caught(tmp_path):
    """The check at load has teeth: the layers of transformers do not pass it."""
    engine = load_engine(str(tiny_model("llama", tmp_path)), engine="transformers")
    with pytest.raises(UnsupportedModelError, match="not deterministic"):
        check_deterministic(engine)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"engine": "transformers"}, "needs the compiled CPU kernel: the engine is transf"),
        ({"dtype": "bfloat16"}, "float32 on CPU"),
        ({"threads": 2}, "1 thread"),
    ],
)
def test_load_of_what_is_not_deterministic_refused(tmp_path, options, reason):
    threads = torch.get_num_threads()
    try:
        with pytest.raises(UnsupportedModelError, match=reason):
            load_engine(str(tiny_model("llama", tmp_path)), deterministic=True, **options)
    finally:
        torch.set_num_threads(threads)
