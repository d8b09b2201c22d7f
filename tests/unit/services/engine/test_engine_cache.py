"""Sessions' caches: gaps, eviction, forks, prefixes, steps that must change nothing, and retained caches."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gammaray.errors import FailedPreconditionError, ResourceExhaustedError
from services.engine.core.batch import SequenceInput
from services.engine.core.errors import CacheFullError, CacheGapError
from services.engine.core.prefix_cache import MAX_RETAINED, MIN_PREFIX
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
    with pytest.raises(CacheGapError, match="session 'a' has 0 cached tokens"):
        engine.step([SequenceInput("a", 3, [1], 1)])
    fill(engine, "a", 5)
    with pytest.raises(CacheGapError, match="has 5 cached tokens") as known:
        engine.step([SequenceInput("a", 6, [1], 1)])
    assert isinstance(known.value, FailedPreconditionError)
    assert engine.length("a") == 5


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


def test_step_beyond_the_budget_raises_and_keeps_everything(directory):
    engine = load_engine(str(directory), cache_budget_bytes=2 * BLOCK_BYTES)
    fill(engine, "a", 5)
    fill(engine, "b", 5)
    sizes = f"needs {3 * BLOCK_BYTES} bytes of cache, the budget is {2 * BLOCK_BYTES}"
    with pytest.raises(CacheFullError, match=sizes) as full:
        engine.step([SequenceInput("c", 0, random_tokens(65, 1), 1), SequenceInput("a", 2, [1], 1)])
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


def small(directory: Path, num_blocks: int) -> Engine:
    return load_engine(str(directory), cache_budget_bytes=num_blocks * BLOCK_BYTES)


def leave(engine: Engine, tokens: list[int], salt: str = "us", session_id: str = "ended") -> None:
    engine.step([SequenceInput(session_id, 0, tokens, 0)])
    engine.retain(session_id, salt)


def test_a_session_shares_later_cached_tokens(engine):
    tokens = random_tokens(40, 1)
    engine.share("live", "us")
    engine.step([SequenceInput("live", 0, tokens[:20], 0)])
    assert engine.longest_prefix(tokens, "us") == ("live", 20)
    engine.step([SequenceInput("live", 20, tokens[20:], 0)])
    assert engine.longest_prefix(tokens, "us") == ("live", 40)
    engine.release("live")
    engine.step([SequenceInput("live", 0, tokens, 0)])
    assert engine.longest_prefix(tokens, "us") == ("", 0), "another session of that name"


def test_short_chains_and_unknown_sessions_are_not_retained(engine):
    leave(engine, random_tokens(MIN_PREFIX - 1, 1))
    engine.retain("unknown", "us")
    assert engine.stats().retained_bytes == 0


def test_tree_nodes_are_not_retained(engine):
    tokens = random_tokens(20, 1)
    engine.step([SequenceInput("ended", 0, tokens, 1)])
    engine.step([SequenceInput("ended", 20, [1, 2, 3], 3, [-1, -1, 0])])
    engine.retain("ended", "us")
    assert engine.longest_prefix([*tokens, 1, 3], "us")[1] == 20


def test_a_cache_covered_by_another_is_not_retained(engine):
    tokens = random_tokens(60, 1)
    leave(engine, tokens[:30])
    leave(engine, tokens)
    leave(engine, tokens[:40])
    assert engine.stats().retained_bytes == BLOCK_BYTES
    assert engine.longest_prefix(tokens, "us")[1] == 60
    leave(engine, tokens, "them")
    assert engine.stats().retained_bytes == 2 * BLOCK_BYTES, "another salt has its own"


def test_retained_caches_are_evicted_before_sessions(directory):
    engine = small(directory, 4)
    engine.step([SequenceInput("old", 0, random_tokens(20, 1), 0)])
    texts = [random_tokens(20, seed) for seed in (2, 3)]
    for text in texts:
        leave(engine, text)
    assert engine.has_room("another", 128), "what is retained is free room"
    engine.step(
        [SequenceInput("a", 0, random_tokens(20, 4), 0), SequenceInput("b", 0, random_tokens(20, 5), 0)]
    )
    assert [engine.longest_prefix(text, "us")[1] for text in texts] == [0, 20], "the older one went"
    engine.step([SequenceInput("c", 0, random_tokens(20, 6), 0)])
    stats = engine.stats()
    assert (stats.num_sessions, stats.num_evictions, stats.retained_bytes) == (4, 0, 0)
    assert stats.cache_bytes == stats.cache_budget_bytes


def test_slots_are_moved_if_two_copies_do_not_fit(directory):
    engine = small(directory, 2)
    run = CheckedEngine(engine, plain_model(directory))
    tokens = random_tokens(50, 1)
    leave(engine, tokens)
    engine.step([SequenceInput("live", 0, random_tokens(9, 2), 0)])
    source, _ = engine.longest_prefix(tokens, "us")
    engine.fork(source, "new", 40)
    stats = engine.stats()
    assert (stats.num_sessions, stats.num_evictions, stats.retained_bytes) == (2, 0, 0)
    assert stats.cache_bytes == 2 * BLOCK_BYTES
    assert engine.longest_prefix(tokens, "us") == ("", 0), "handed over"
    run.step(SequenceInput("new", 40, random_tokens(5, 3), 5))
    assert run.worst <= 1e-4
    with pytest.raises(CacheGapError):
        engine.fork(source, "late", 40)


def test_failed_allocation_evicts_retained_caches(engine, monkeypatch):
    leave(engine, random_tokens(20, 1))
    zeros, failures = torch.zeros, [RuntimeError("out of memory")]

    def scarce(*arguments: Any, **options: Any) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return zeros(*arguments, **options)

    monkeypatch.setattr(torch, "zeros", scarce)
    engine.step([SequenceInput("new", 0, random_tokens(9, 2), 0)])
    assert engine.length("new") == 9
    assert engine.stats().retained_bytes == 0
    failures.append(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step([SequenceInput("another", 0, random_tokens(9, 2), 0)])


def test_forget_drops_the_retained_cache_of_the_session(engine):
    text, other = random_tokens(20, 1), random_tokens(20, 2)
    leave(engine, text, session_id="secret")
    leave(engine, other)
    engine.step([SequenceInput("secret", 0, text, 0)])
    engine.forget("secret")
    assert engine.length("secret") == 0
    assert [engine.longest_prefix(tokens, "us")[1] for tokens in (text, other)] == [0, 20]
    engine.drop_retained()
    assert engine.longest_prefix(other, "us") == ("", 0)
    assert engine.stats().retained_bytes == 0


def test_number_of_retained_caches_is_bounded(engine):
    texts = [[seed % 90, seed // 90, *random_tokens(MIN_PREFIX, 1)] for seed in range(MAX_RETAINED + 2)]
    for text in texts:
        leave(engine, text)
    assert engine.stats().retained_bytes == MAX_RETAINED * BLOCK_BYTES
    assert [engine.longest_prefix(text, "us")[1] > MIN_PREFIX for text in texts[:3]] == [False, False, True]
