"""Retained caches of ended sessions: who can use them, exactness, and eviction."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.core.batch import SequenceInput
from services.engine.core.errors import CacheGapError
from services.engine.core.prefix_cache import MAX_RETAINED, MIN_PREFIX
from services.engine.engine import Engine
from services.engine.loader import load_engine
from tests.support.engine_helpers import CheckedEngine, plain_model, random_tokens, tiny_model

# Layers x key and value heads x head_dim x bytes of a float32, 64 slots.
BLOCK_BYTES = 64 * 3 * 4 * 8 * 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("retained"), max_position_embeddings=256)


@pytest.fixture
def engine(directory):
    return load_engine(str(directory))


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
