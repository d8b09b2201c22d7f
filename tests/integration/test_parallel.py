"""A target over two ranks (gloo, on the CPU) against one: logits, caches, refusals, and ranks that die."""

import asyncio
import os
import signal
import sys

import psutil
import pytest
import torch
from test_workers_process import EXIT_TIMEOUT_S, spawned

from gammaray.errors import FailedPreconditionError, InvalidArgumentError
from services.demo_pair import TARGET_DIR
from services.engine.core.errors import (
    CacheFullError,
    CacheGapError,
    EngineLostError,
    UnsupportedModelError,
)
from services.engine.engine import SequenceInput
from services.engine.loader import load_engine
from services.engine.tensor_parallel.engine import ParallelEngine, check_parallel
from services.engine.tensor_parallel.rank_main import follow
from services.engine.tensor_parallel.ranks import Ranks, RankSpec, meeting_place
from services.scheduling.planning import Limits
from services.streaming.engine_thread import EngineThread
from services.target.scheduler import TargetScheduler
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.workers.held_engine import all_read
from tests.support.workers.workers_helpers import Link, verify_block

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform == "win32", reason="pipes are handed down by number"),
]

RANK_BUDGET = 64 * 16 * 64 * 2 * 4 * 3  # three blocks of 64 slots: 16 layers, one head of 64 keys and values
UNAVAILABLE = 14


def some_tokens(count, seed=0):
    return random_tokens(count, seed, vocab_size=2048)


def both_budgets(num_ranks):
    return RANK_BUDGET * 2 // num_ranks


def other_rank(pid):
    """Return the process of rank 1."""
    (rank,) = [
        p
        for p in psutil.Process(pid).children()
        if "services.engine.tensor_parallel.rank_main" in p.cmdline()
    ]
    return rank


class Pair:
    """Two ranks and one rank that get the same calls."""

    def __init__(self, two, one):
        self.two, self.one = two, one

    def step(self, *feeds):
        """Take a step on both; the logits must be the same up to rounding."""
        results = [engine.step(feeds) for engine in (self.two, self.one)]
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        return results[0]

    def do(self, name, *arguments):
        for engine in (self.two, self.one):
            getattr(engine, name)(*arguments)

    def refuse(self, error, *feeds):
        for engine in (self.two, self.one):
            with pytest.raises(error):
                engine.step(feeds)


@pytest.fixture(scope="module")
def pair():
    model = str(TARGET_DIR)
    one = load_engine(model, device="cpu", fast_kernels=False, cache_budget_bytes=both_budgets(1))
    two = ParallelEngine.load_parallel(
        model, num_ranks=2, device="cpu", cache_budget_bytes=both_budgets(2), timeout_s=200
    )
    yield Pair(two, one)
    two.close()


@pytest.fixture
def clean(pair):
    yield pair
    for session_id in "abcd":
        pair.do("release", session_id)


def test_each_rank_holds_half_of_every_cache(clean):
    clean.step(SequenceInput("a", 0, some_tokens(9), 9))
    assert clean.two.stats().cache_bytes * 2 == clean.one.stats().cache_bytes > 0


def test_chains_rollbacks_and_ragged_batches_agree(clean):
    first, second = some_tokens(40, 1), some_tokens(30, 2)
    clean.step(SequenceInput("a", 0, first, 40))
    clean.step(SequenceInput("a", 40, [5, 6, 7], 3), SequenceInput("b", 0, second, 2))
    clean.do("truncate", "a", 41)
    clean.step(SequenceInput("a", 41, [8], 1), SequenceInput("b", 30, [1, 2, 3, 4], 4))
    clean.step(SequenceInput("a", 20, [9, 10], 1))  # a rollback that the feed itself asks for


def test_hidden_states_are_those_of_one_rank(clean):
    """Each rank holds whole hidden states; the first records them, and the others do not know."""
    layers, tree = [0, 8, 16, 3], (-1, -1, 0, 0, 1)
    try:
        clean.do("tap", layers)
        for feeds in (
            [SequenceInput("a", 0, some_tokens(20, 1), 0), SequenceInput("b", 0, some_tokens(5, 2), 2)],
            [SequenceInput("a", 20, some_tokens(6, 3), 5, tree), SequenceInput("b", 5, [1], 1)],
        ):
            clean.step(*feeds)
            assert [len(states) for states in clean.two.taps] == [len(feed.token_ids) for feed in feeds]
            for got, expected in zip(clean.two.taps, clean.one.taps, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
        with pytest.raises(InvalidArgumentError):
            clean.two.tap([17])
    finally:
        clean.do("tap", [])
    clean.step(SequenceInput("b", 6, [1], 1))
    assert clean.two.taps == []


def test_cache_limit_is_that_of_every_rank(clean):
    """Ranks that evicted differently would compute different things."""
    try:
        for engine, num_ranks in ((clean.two, 2), (clean.one, 1)):
            engine.limit_cache(both_budgets(num_ranks) // 3)  # one block of slots
        for session_id in "abcd":
            clean.step(SequenceInput(session_id, 0, some_tokens(20), 20))
        stats = clean.two.stats()
        assert stats.cache_bytes == stats.cache_budget_bytes == both_budgets(2) // 3
        assert stats.num_evictions >= 3
        clean.refuse(CacheFullError, SequenceInput("a", 0, some_tokens(100), 1))
    finally:
        for engine, num_ranks in ((clean.two, 2), (clean.one, 1)):
            engine.limit_cache(both_budgets(num_ranks))
    clean.step(SequenceInput("a", 0, some_tokens(100), 1))


def test_trees_and_forks_agree(clean):
    clean.step(SequenceInput("a", 0, some_tokens(20, 3), 1))
    clean.step(SequenceInput("a", 20, [1, 2, 3, 4, 5], 5, [-1, -1, 0, 1, 2]))
    clean.do("keep_path", "a", 20, [1, 3])
    clean.step(SequenceInput("a", 22, [6], 1))
    clean.do("fork", "a", "b", 21)
    clean.step(SequenceInput("b", 21, [7, 8], 2), SequenceInput("a", 23, [9], 1))


def test_retained_caches_agree(clean):
    tokens = some_tokens(30, 6)
    clean.step(SequenceInput("a", 0, tokens, 1))
    clean.do("retain", "a", "us")
    sources = {engine.longest_prefix(tokens, "us") for engine in (clean.two, clean.one)}
    ((source, length),) = sources
    assert length == 30
    clean.do("fork", source, "b", 25)
    clean.step(SequenceInput("b", 25, [3, 4], 2))
    clean.do("forget", "a")
    assert clean.two.stats().retained_bytes == clean.one.stats().retained_bytes == 0
    clean.step(SequenceInput("b", 27, [5], 1))


def test_ranks_evict_the_same_retained_caches(clean):
    for seed in range(20):  # more than fit
        clean.step(SequenceInput("a", 0, some_tokens(70, seed), 1))
        clean.do("retain", "a", "us")
    kept = [clean.two.longest_prefix(some_tokens(70, seed), "us") for seed in range(20)]
    assert kept == [clean.one.longest_prefix(some_tokens(70, seed), "us") for seed in range(20)]
    assert [length for _, length in kept].count(70) < 20
    for seed, (source, length) in enumerate(kept):
        if length == 70:  # rank 1 would be lost, were it not there
            clean.do("fork", source, "b", 66)
            clean.step(SequenceInput("b", 66, [seed], 1))
    clean.do("drop_retained")
    clean.step(SequenceInput("b", 67, [1], 1))


def test_sampled_and_greedy_tokens_agree(clean):
    generator = torch.Generator().manual_seed(4)
    tokens = some_tokens(10, 5)
    noise = -torch.log(-torch.log(torch.rand(40, 2048, generator=generator)))
    fed = 0
    for position in range(40):
        scores = []
        for engine in (clean.two, clean.one):
            (logits,) = engine.step([SequenceInput("a", fed, tokens[fed:], 1)])
            scores.append(logits[0] + (noise[position] if position % 2 else 0))
        fed = len(tokens)
        winners = [int(score.argmax()) for score in scores]
        if winners[0] != winners[1]:  # allowed for a tie alone: two candidates within rounding
            best = scores[1].topk(2).values
            assert best[0] - best[1] < 2e-4
        tokens.append(winners[1])


def test_refused_steps_change_nothing_on_any_rank(clean):
    clean.step(SequenceInput("a", 0, some_tokens(60, 6), 1))
    clean.refuse(CacheGapError, SequenceInput("b", 3, [1], 1))
    clean.refuse(ValueError, SequenceInput("a", 60, [99999], 1))
    clean.refuse(CacheFullError, SequenceInput("a", 60, [1], 1), SequenceInput("b", 0, some_tokens(190), 1))
    clean.step(SequenceInput("a", 60, [1], 1))


def test_ranks_evict_the_same_sessions(clean):
    for session_id, seed in zip("abc", range(3), strict=True):
        clean.step(SequenceInput(session_id, 0, some_tokens(50, seed), 1))
    clean.step(SequenceInput("a", 50, [1], 1))
    clean.step(SequenceInput("d", 0, some_tokens(50, 9), 1))  # b is the one that goes
    assert [clean.two.length(s) for s in "abcd"] == [clean.one.length(s) for s in "abcd"] == [51, 0, 50, 50]
    clean.step(SequenceInput("a", 51, [2], 1), SequenceInput("c", 50, [3], 1), SequenceInput("d", 50, [4], 1))


def test_second_parallel_model_in_one_process_is_refused(pair):
    with pytest.raises(FailedPreconditionError, match="already"):
        ParallelEngine.load_parallel(str(TARGET_DIR), num_ranks=2, device="cpu", timeout_s=60)
    pair.step(SequenceInput("a", 0, [1, 2, 3], 3))


def test_too_few_devices_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(InvalidArgumentError, match="tensor_parallel: got 2, allowed: at most 1"):
        check_parallel(str(TARGET_DIR), 2, "auto")
    with pytest.raises(InvalidArgumentError, match="device: got cpu"):
        check_parallel(str(TARGET_DIR), 2, "cpu")


def test_failure_to_start_a_rank_reports_its_status(monkeypatch):
    monkeypatch.setattr("services.engine.tensor_parallel.ranks.sys.executable", "/bin/false")
    ranks = Ranks.start(RankSpec("m", 2, "cpu", "auto", 1, 1, 10.0, meeting_place()))
    with pytest.raises(EngineLostError, match=r"rank 1 .*ended (with status 1|before it was started)"):
        ranks.wait("started")
    ranks.stop()


@pytest.mark.parametrize(("ranks", "heads"), [(4, "num_key_value_heads"), (3, "num_attention_heads")])
def test_heads_that_cannot_be_shared_evenly_are_refused(ranks, heads):
    with pytest.raises(InvalidArgumentError, match=heads) as caught:
        check_parallel(str(TARGET_DIR), ranks, "cpu")
    assert caught.value.field == "tensor_parallel"


def test_architecture_without_a_plan_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="no tensor-parallel plan for opt"):
        check_parallel(str(tiny_model("opt", tmp_path)), 2, "cpu")


def test_rank_survives_rejected_steps_but_not_failures():
    class Refusing:
        def __init__(self, error):
            self.error, self.calls = error, []

        def truncate(self, *arguments):
            self.calls.append(arguments)

        def step(self, feeds):
            raise self.error

    engine = Refusing(CacheGapError("a", 1))
    follow(engine, [("truncate", ("a", 3))], [])
    assert engine.calls == [("a", 3)]
    with pytest.raises(RuntimeError, match="out of memory"):
        follow(Refusing(RuntimeError("out of memory")), [], [])


async def test_dead_rank_ends_its_worker_and_fails_waiting_calls():
    options = ["--model", TARGET_DIR, "--tensor-parallel", 2, "--prefill-chunk", 16]
    async with spawned("target", *options, GAMMARAY_DEVICE="cpu") as (process, address):
        rank = other_rank(process.pid)
        link = Link(address, "target")
        answer = await link.ask(verify_block([1, 2, 3]))
        assert answer.WhichOneof("outcome") == "verdict"
        os.kill(rank.pid, signal.SIGSTOP)  # what comes now cannot be done before it is killed
        (pending,) = await link.send([verify_block(some_tokens(1500), session_id="t")])
        await all_read(link)
        os.kill(rank.pid, signal.SIGKILL)
        answer = await asyncio.wait_for(pending, EXIT_TIMEOUT_S)
        assert answer.error.code == UNAVAILABLE
        assert await asyncio.wait_for(process.wait(), EXIT_TIMEOUT_S) == 1
        await link.close()


async def test_ranks_end_with_a_killed_worker():
    options = ["--model", TARGET_DIR, "--tensor-parallel", 2]
    async with spawned("target", *options, GAMMARAY_DEVICE="cpu") as (process, _):
        rank = other_rank(process.pid)
        process.kill()
        await asyncio.to_thread(rank.wait, EXIT_TIMEOUT_S)


async def test_thread_of_an_idle_engine_ends_when_that_is_lost(pair):
    scheduler = TargetScheduler(pair.two, Limits(1024, 256))
    thread = EngineThread(lambda: scheduler, name="idle")
    await thread.start()
    thread.check()
    assert await thread.call(lambda s: s.has_work) is False
    rank = other_rank(os.getpid())  # this is the last test that needs it
    rank.kill()
    rank.wait(EXIT_TIMEOUT_S)
    with pytest.raises(EngineLostError, match="rank 1"):
        pair.two.step([SequenceInput("a", 0, [1], 1)])
    thread.check()
    await asyncio.wait_for(thread.ended.wait(), EXIT_TIMEOUT_S)
    assert await thread.stop(EXIT_TIMEOUT_S)
