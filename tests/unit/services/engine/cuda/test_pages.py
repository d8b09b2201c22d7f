"""Pages of the captured path: feeds, forks, trees and evictions in any order keep the caches' contents."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from services.engine.core.batch import Batch, SequenceInput, node_path
from services.engine.core.errors import CacheFullError
from services.engine.core.kv_cache import BLOCK, CacheShape
from services.engine.cuda.pages import PagedCache, PagedStore
from services.engine.engine import Engine

SHAPE = CacheShape(2, 4, 1, torch.float64, torch.device("cpu"))
PAGE_BYTES = BLOCK * SHAPE.slot_bytes
VOCAB = 7
names = st.sampled_from("abcd")
texts = st.integers(0, 1)
lengths = st.one_of(st.integers(1, 5), st.integers(1, 160))


def text_of(seed: int, length: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def state_after(state: float, token: int) -> float:
    """The number that stands for the keys and values of a token: that of all tokens up to it."""
    return (state * 31 + token + 1) % 1048573


def states_of(tokens: list[int]) -> list[float]:
    states, state = [], 0.0
    for token in tokens:
        state = state_after(state, token)
        states.append(state)
    return states


def read(cache: PagedCache, slot: int) -> float:
    values = cache.data[cache.pages[slot // BLOCK], :, :, slot % BLOCK, 0]
    assert (values == values[0, 0]).all()
    return float(values[0, 0])


class Recorder:
    """A runner whose keys and values are `state_after`; it may only write pages that nobody else has."""

    def __init__(self, store: PagedStore) -> None:
        self.store = store

    def forward(self, batch: Batch) -> Tensor:
        for segment in batch.segments:
            cache, base = segment.cache, segment.start
            assert isinstance(cache, PagedCache)
            num_nodes = len(segment.parents or ())
            for row in range(segment.count):
                slot = segment.slot + row
                node = row - (segment.count - num_nodes) + segment.num_kept
                before = slot - 1
                if segment.parents is not None and row >= segment.count - num_nodes:
                    prefix, slots = node_path(segment, node)
                    before = ([prefix - 1, *slots])[-2]
                page = cache.pages[slot // BLOCK]
                assert self.store.pool.owners[page] == 1, (base, slot)
                state = read(cache, before) if before >= 0 else 0.0
                token = batch.token_ids[segment.row + row]
                cache.data[page, :, :, slot % BLOCK] = state_after(state, token)
        return torch.zeros(len(batch.token_ids) if batch.logit_rows is None else 0, VOCAB)


def new_engine(num_pages: int) -> tuple[Engine, PagedStore]:
    store = PagedStore(SHAPE, num_pages * PAGE_BYTES)
    return Engine(Recorder(store), store, model_name="m", vocab_size=VOCAB, max_context=10_000), store


class Pages(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine, self.store = new_engine(7)

    @rule(name=names, text=texts, back=lengths, length=lengths)
    def feed(self, name: str, text: int, back: int, length: int) -> None:
        """Roll back, and follow the text from there."""
        start = max(0, self.engine.length(name) - back)
        tokens = text_of(text, start + length)[start:]
        held, stats = {n: list(self.engine.tokens(n)) for n in "abcd"}, self.engine.stats()
        try:
            self.engine.step([SequenceInput(name, start, tokens, 0)])
        except CacheFullError:
            assert start + length > 6 * BLOCK, "it fits alone"
            assert {n: list(self.engine.tokens(n)) for n in "abcd"} == held
            assert self.engine.stats() == stats

    @rule(back=st.integers(1, 70), length=st.integers(1, 70))
    def feed_together(self, back: int, length: int) -> None:
        feeds = []
        for name in "ab":
            start = max(0, min(self.engine.length(name) - back, 2 * BLOCK))
            feeds.append(SequenceInput(name, start, text_of(0, start + length)[start:], 0))
        try:
            self.engine.step(feeds)
        except CacheFullError:
            ends = [feed.start + len(feed.token_ids) for feed in feeds]
            assert sum(-(-end // BLOCK) for end in ends) > 6, "both fit"

    @rule(
        name=names, more=st.integers(0, 3), tokens=st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=6)
    )
    def tree(self, name: str, more: int, tokens: list[int]) -> None:
        """A tree with a branch that starts before the end of the chain."""
        start = self.engine.length(name)
        if start < 4 or start > 5 * BLOCK:
            return
        parents = [max(-1, node - 2) for node in range(len(tokens))]
        parents[-1] = -1 - more
        self.engine.step([SequenceInput(name, start, tokens, len(tokens), parents)])

    @rule(name=names, at=st.integers(0, 5))
    def keep_path(self, name: str, at: int) -> None:
        cache = self.store.get(name)
        if cache is None or not cache.tree_tokens:
            return
        node = at % len(cache.tree_tokens)
        path = [node]
        while cache.tree_parents[path[0]] >= 0:
            path.insert(0, cache.tree_parents[path[0]])
        base = len(cache.tokens) + cache.tree_parents[path[0]] + 1
        self.engine.keep_path(name, base, path)

    @rule(source=names, copy=names, back=lengths)
    def fork(self, source: str, copy: str, back: int) -> None:
        length = max(0, self.engine.length(source) - back)
        if length:
            self.engine.fork(source, copy, length)

    @rule(name=names, text=texts, length=lengths)
    def begin_from_prefix(self, name: str, text: int, length: int) -> None:
        source, shared = self.engine.longest_prefix(text_of(text, length), "us")
        if shared and source != name:
            self.engine.fork(source, name, shared)
            assert list(self.engine.tokens(name)) == text_of(text, length)[:shared]

    @rule(name=names)
    def retain(self, name: str) -> None:
        self.engine.retain(name, "us")

    @rule(name=names, forgets=st.booleans())
    def end(self, name: str, forgets: bool) -> None:
        (self.engine.forget if forgets else self.engine.release)(name)

    @rule(num_pages=st.sampled_from([6, 7, 9]))
    def limit_budget(self, num_pages: int) -> None:
        self.engine.limit_cache(num_pages * PAGE_BYTES)

    @precondition(lambda self: self.engine.stats().retained_bytes)
    @rule()
    def drop_retained(self) -> None:
        self.engine.drop_retained()
        assert self.engine.stats().retained_bytes == 0

    @invariant()
    def every_slot_has_its_contents(self) -> None:
        for name in "abcd":
            cache = self.store.get(name)
            if cache is None:
                continue
            assert isinstance(cache, PagedCache)
            states = states_of(cache.tokens)
            for node, parent in enumerate(cache.tree_parents):
                states.append(state_after(states[len(cache.tokens) + parent], cache.tree_tokens[node]))
            assert [read(cache, slot) for slot in range(len(states))] == states
            expected = torch.tensor(cache.pages) * cache.data[0].numel()
            assert torch.equal(cache.offsets[: len(cache.pages)], expected)

    @invariant()
    def no_page_is_lost(self) -> None:
        pool, stats = self.store.pool, self.engine.stats()
        caches = [cache for cache in map(self.store.get, "abcd") if isinstance(cache, PagedCache)]
        live = Counter(page for cache in caches for page in cache.pages)
        assert {page: count for page, count in enumerate(pool.sessions) if count} == live
        assert all(owners >= sessions for owners, sessions in zip(pool.owners, pool.sessions, strict=True))
        used = sum(owners > 0 for owners in pool.owners)
        assert (pool.num_used, pool.num_live) == (used, len(live))
        assert stats.cache_bytes == len(live) * PAGE_BYTES
        assert stats.retained_bytes == (used - len(live)) * PAGE_BYTES

    def teardown(self) -> None:
        pool = self.store.pool
        for name in "abcd":
            self.engine.release(name)
        self.engine.drop_retained()
        assert not any(pool.owners)
        assert sorted(pool.new() for _ in pool.owners) == list(range(len(pool.owners)))


TestPages = Pages.TestCase
TestPages.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def contents(store: PagedStore, name: str) -> list[float]:
    cache = store.get(name)
    assert isinstance(cache, PagedCache)
    return [read(cache, slot) for slot in range(len(cache.tokens))]


def test_path_that_overwrites_the_chain_leaves_a_fork_as_it_is() -> None:
    engine, store = new_engine(4)
    text = text_of(0, 60)
    engine.step([SequenceInput("a", 0, text, 0)])
    engine.step([SequenceInput("a", 60, [1, 2], 2, [-1, -4])])
    engine.fork("a", "b", 60)
    assert engine.stats().cache_bytes == PAGE_BYTES, "shared, not copied"
    engine.keep_path("a", 57, [1])
    assert contents(store, "b") == states_of(text)
    assert contents(store, "a") == states_of([*text[:57], 2])


def test_a_path_evicts_the_other_owner_when_no_page_is_free() -> None:
    engine, store = new_engine(1)
    text = text_of(0, 60)
    engine.step([SequenceInput("a", 0, text, 0)])
    engine.step([SequenceInput("a", 60, [1, 2], 2, [-1, -4])])
    engine.fork("a", "b", 60)
    engine.keep_path("a", 57, [1])
    assert contents(store, "a") == states_of([*text[:57], 2])
    assert (engine.length("b"), engine.stats().num_evictions) == (0, 1)


def test_a_cache_that_a_retained_one_covers_frees_its_pages() -> None:
    engine, store = new_engine(4)
    for _ in range(2):
        engine.step([SequenceInput("a", 0, text_of(0, 60), 0)])
        engine.retain("a", "us")
    assert store.pool.num_used == 1


def test_sessions_that_write_one_shared_page_evict_nobody_needlessly() -> None:
    """Of two owners who both write, only the first takes a copy."""
    engine, store = new_engine(3)
    engine.step([SequenceInput("other", 0, text_of(1, 9), 0)])
    engine.step([SequenceInput("a", 0, text_of(0, 60), 0)])
    engine.fork("a", "b", 60)
    engine.step([SequenceInput(name, 59, [3, 4], 0) for name in "ab"])
    assert engine.stats().num_evictions == 0
    assert contents(store, "a") == contents(store, "b") == states_of([*text_of(0, 59), 3, 4])
