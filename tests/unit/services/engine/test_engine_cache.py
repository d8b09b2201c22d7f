"""Sessions' caches: gaps, eviction under the budget, forks, prefixes, and steps that must change nothing."""

import pytest

from gammaray.errors import FailedPreconditionError, ResourceExhaustedError
from services.engine.core.batch import SequenceInput
from services.engine.core.errors import CacheFullError, CacheGapError
from services.engine.engine import Engine
from services.engine.loader import load_engine
from tests.support.engine_helpers import (
    MAX_CONTEXT,
    VOCAB_SIZE,
    CheckedEngine,
    plain_model,
    random_tokens,
    tiny_model,
)

# Layers x key and value heads x head_dim x bytes of a float32.
SLOT_BYTES = 3 * 4 * 8 * 4
BLOCK_BYTES = 64 * SLOT_BYTES


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def engine(directory):
    return load_engine(str(directory))


def fill(engine: Engine, session_id: str, count: int, seed: int = 1) -> list[int]:
    tokens = random_tokens(count, seed)
    engine.step([SequenceInput(session_id, 0, tokens, 0)])
    return tokens


def test_feed_past_the_cache_raises_gap_with_length(engine):
    with pytest.raises(CacheGapError) as unknown:
        engine.step([SequenceInput("a", 3, [1], 1)])
    assert (unknown.value.session_id, unknown.value.length) == ("a", 0)
    fill(engine, "a", 5)
    with pytest.raises(CacheGapError) as known:
        engine.step([SequenceInput("a", 6, [1], 1)])
    assert known.value.length == 5
    assert isinstance(known.value, FailedPreconditionError)
    assert engine.length("a") == 5


def test_tree_nodes_join_the_chain_only_when_kept(engine):
    tokens = fill(engine, "a", 4)
    engine.step([SequenceInput("a", 4, [10, 11, 12, 13], 3, [-1, -1, 1])])
    assert engine.tokens("a") == [*tokens, 10]
    with pytest.raises(CacheGapError):
        engine.step([SequenceInput("a", 6, [1], 1)])
    engine.keep_path("a", 5, [1, 2])
    assert engine.tokens("a") == [*tokens, 10, 12, 13]


@pytest.mark.parametrize(("base", "path"), [(4, [0]), (6, [0]), (5, [2]), (5, [0, 2]), (5, [3]), (5, [1, 1])])
def test_keep_path_wrong_base_or_path_raises(engine, base, path):
    fill(engine, "a", 5)
    engine.step([SequenceInput("a", 5, [11, 12, 13], 3, [-1, -1, 1])])
    with pytest.raises(ValueError, match=r"base|path"):
        engine.keep_path("a", base, path)
    engine.keep_path("a", 5, [1, 2])


def test_fork_copies_and_is_independent(engine, directory):
    run = CheckedEngine(engine, plain_model(directory))
    tokens = fill(engine, "a", 70)
    fill(engine, "b", 3)
    engine.fork("a", "b", 66)
    run.step(SequenceInput("b", 66, random_tokens(4, 9), 4))
    run.step(SequenceInput("a", 70, random_tokens(2, 8), 2))
    assert engine.tokens("a")[:70] == tokens
    assert engine.tokens("b")[:66] == tokens[:66]
    assert run.worst <= 1e-4
    engine.fork("a", "a", 10)
    assert engine.length("a") == 10
    with pytest.raises(CacheGapError):
        engine.fork("a", "c", 11)
    with pytest.raises(CacheGapError):
        engine.fork("unknown", "c", 0)


def test_longest_prefix_finds_the_best_session(engine):
    assert engine.longest_prefix([1, 2], "us") == ("", 0)
    engine.step(
        [
            SequenceInput("a", 0, [1, 2, 3], 0),
            SequenceInput("b", 0, [1, 2, 4, 5, 6], 0),
            SequenceInput("c", 0, [9], 0),
        ]
    )
    for session_id in "abc":
        engine.share(session_id, "us")
    assert engine.longest_prefix([1, 2, 4, 5, 7, 8], "us") == ("b", 4)
    assert engine.longest_prefix([1, 2, 3, 4], "us") == ("a", 3)
    assert engine.longest_prefix((9,), "us") == ("c", 1)
    assert engine.longest_prefix([8], "us") == ("", 0)


def test_budget_evicts_the_least_recently_used(directory):
    engine = load_engine(str(directory), cache_budget_bytes=3 * BLOCK_BYTES)
    for name in "abc":
        fill(engine, name, 5)
    engine.step([SequenceInput("a", 5, [1], 1)])
    fill(engine, "d", 5)
    assert [engine.length(name) for name in "abcd"] == [6, 0, 5, 5]
    engine.step([SequenceInput("a", 6, random_tokens(70, 2), 1)])
    assert [engine.length(name) for name in "abcd"] == [76, 0, 0, 5]
    stats = engine.stats()
    assert (stats.num_sessions, stats.num_evictions) == (2, 2)
    assert stats.cache_bytes <= stats.cache_budget_bytes == 3 * BLOCK_BYTES


def test_evicted_session_refed_gives_the_same_logits(directory):
    engine = load_engine(str(directory), cache_budget_bytes=BLOCK_BYTES)
    run = CheckedEngine(engine, plain_model(directory))
    tokens = fill(engine, "a", 9)
    fill(engine, "b", 9)
    with pytest.raises(CacheGapError) as gap:
        engine.step([SequenceInput("a", 9, [1], 1)])
    assert gap.value.length == 0
    run.step(SequenceInput("a", 0, [*tokens, 1], 1))
    assert run.worst <= 1e-4


def test_step_beyond_the_budget_raises_and_keeps_everything(directory):
    engine = load_engine(str(directory), cache_budget_bytes=2 * BLOCK_BYTES)
    fill(engine, "a", 5)
    fill(engine, "b", 5)
    with pytest.raises(CacheFullError) as full:
        engine.step([SequenceInput("c", 0, random_tokens(65, 1), 1), SequenceInput("a", 2, [1], 1)])
    assert (full.value.needed_bytes, full.value.budget_bytes) == (3 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert isinstance(full.value, ResourceExhaustedError)
    assert (engine.length("a"), engine.length("b"), engine.length("c")) == (5, 5, 0)


def test_fork_never_evicts_its_source(directory):
    engine = load_engine(str(directory), cache_budget_bytes=2 * BLOCK_BYTES)
    tokens = fill(engine, "a", 5)
    fill(engine, "b", 5)
    engine.fork("a", "c", 4)
    assert (engine.tokens("a"), engine.length("b"), engine.tokens("c")) == (tokens, 0, tokens[:4])
    with pytest.raises(CacheFullError):
        engine.step([SequenceInput("a", 5, random_tokens(100, 1), 0), SequenceInput("c", 4, [1], 0)])


WRONG_FEEDS = {
    "no token": SequenceInput("a", 5, [], 0),
    "token id = vocabulary": SequenceInput("a", 5, [VOCAB_SIZE], 1),
    "negative token id": SequenceInput("a", 5, [-1], 1),
    "negative start": SequenceInput("a", -1, [1], 1),
    "more logits than tokens": SequenceInput("a", 5, [1], 2),
    "negative logits": SequenceInput("a", 5, [1], -1),
    "past the context": SequenceInput("a", 5, [1] * (MAX_CONTEXT - 4), 1),
    "tree past the context": SequenceInput("a", 5, [1] * (MAX_CONTEXT - 5) + [2, 3], 1, [-1, 0]),
    "more parents than tokens": SequenceInput("a", 5, [1], 1, [-1, 0]),
    "parent after its child": SequenceInput("a", 5, [1, 2], 1, [1, -1]),
    "own parent": SequenceInput("a", 5, [1, 2], 1, [-1, 1]),
    "parent before the first token": SequenceInput("a", 5, [1, 2], 1, [-6, -1]),
    "nodes kept that are not there": SequenceInput("a", 7, [1], 1, [-1], 1),
}


@pytest.mark.parametrize("feed", WRONG_FEEDS.values(), ids=WRONG_FEEDS.keys())
def test_step_malformed_feed_raises_and_changes_nothing(engine, feed):
    tokens = fill(engine, "a", 7)
    with pytest.raises(ValueError, match=r"allowed|only"):
        engine.step([SequenceInput("b", 0, [1], 1), feed])
    assert engine.tokens("a") == tokens
    assert engine.length("b") == 0


def test_step_one_session_twice_raises(engine):
    with pytest.raises(ValueError, match="twice"):
        engine.step([SequenceInput("a", 0, [1], 1), SequenceInput("a", 1, [2], 1)])
    assert engine.stats().num_sessions == 0


def test_context_may_be_filled_to_the_last_position(engine, directory):
    run = CheckedEngine(engine, plain_model(directory))
    run.step(SequenceInput("a", 0, random_tokens(MAX_CONTEXT - 2, 1), 1))
    # Siblings share the last positions, so more slots than the context has are fine.
    run.step(SequenceInput("a", MAX_CONTEXT - 2, random_tokens(6, 2), 6, [-1, -1, -1, 0, 1, 1]))
    run.step(SequenceInput("a", MAX_CONTEXT - 2, [3, 4], 2))
    assert run.worst <= 1e-4
