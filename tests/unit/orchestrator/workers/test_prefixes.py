"""Where a session goes that begins like another one."""

import random

import pytest

from orchestrator.workers import prefix_affinity as prefixes
from orchestrator.workers.connection import WorkerConnection
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.prefix_affinity import BLOCK, PrefixIndex, prefix_keys
from orchestrator.workers.protocol import TARGET

TEXT = random.Random(1).choices(range(2048), k=5 * BLOCK + 7)


def test_keys_are_those_of_whole_blocks_and_of_all_before_them():
    keys = prefix_keys(TEXT, "us")
    assert len(keys) == 5
    assert prefix_keys(TEXT[: 3 * BLOCK], "us") == keys[:3]
    other = [TEXT[0] + 1, *TEXT[1:]]
    assert not set(prefix_keys(other, "us")) & set(keys)
    assert not set(prefix_keys(TEXT, "them")) & set(keys)
    assert prefix_keys(TEXT[: BLOCK - 1], "us") == []


def test_known_beginnings_count_from_half_of_a_text_on():
    known, keys = PrefixIndex(), prefix_keys(TEXT, "us")
    known.add(keys[:2])
    assert known.count(keys) == 0
    assert known.count(keys[:4]) == 2
    known.add(keys[2:3])
    assert known.count(keys) == 3
    known.clear()
    assert known.count(keys) == 0


def test_memory_is_bounded_and_keeps_the_latest(monkeypatch):
    monkeypatch.setattr(prefixes, "MAX_KEYS", 4)
    known = PrefixIndex()
    known.add([1, 2, 3])
    known.add([4, 5])
    assert [known.count([key]) for key in (1, 2, 3, 4, 5)] == [1, 1, 0, 1, 1], "the longest goes first"
    known.add([1, 2, 6])
    assert [known.count([key]) for key in (1, 2, 4, 5, 6)] == [1, 1, 1, 0, 1]


@pytest.fixture
def pool(monkeypatch):
    """A pool of three connected workers, without their processes."""
    monkeypatch.setattr(WorkerConnection, "start", lambda link: None)
    pool = WorkerPool(TARGET, lambda info: None)
    pool.announce({"a:1", "b:1", "c:1"})
    for link in pool.links.values():
        link.is_up = True
    return pool


def hold(pool, address, num_sessions):
    pool.links[address].sessions = {str(number) for number in range(num_sessions)}


def test_session_goes_to_who_has_read_most_of_it(pool):
    keys = prefix_keys(TEXT, "us")
    pool.links["b:1"].prefixes.add(keys[:3])
    pool.links["c:1"].prefixes.add(keys)
    assert pool.pick(keys=lambda: keys).address == "c:1"
    assert pool.pick(lambda link: link.address != "c:1", lambda: keys).address == "b:1"
    hold(pool, "a:1", 1)
    hold(pool, "c:1", 1)
    assert pool.pick(keys=lambda: prefix_keys(TEXT, "them")).address == "b:1", "the fewest sessions"


def test_session_goes_elsewhere_when_many_are_there(pool):
    keys = prefix_keys(TEXT, "us")
    pool.links["c:1"].prefixes.add(keys)
    for num_others, num_here, is_taken in ((0, 2, True), (0, 3, False), (10, 17, True), (10, 18, False)):
        for address in ("a:1", "b:1"):
            hold(pool, address, num_others)
        hold(pool, "c:1", num_here)
        assert (pool.pick(keys=lambda: keys).address == "c:1") is is_taken, (num_others, num_here)


def test_worker_that_is_late_is_the_last_resort(pool):
    keys = prefix_keys(TEXT, "us")
    late = pool.links["c:1"]
    late.prefixes.add(keys)
    late.backoff.failed(60.0)
    assert pool.pick_any(keys=lambda: keys).address != "c:1"
    for address in ("a:1", "b:1"):
        pool.links[address].is_up = False
    assert pool.pick(keys=lambda: keys) is None
    assert pool.pick_any(keys=lambda: keys) is late
