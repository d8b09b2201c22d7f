"""Running ahead by one cycle: stored before it is seen, in order, nothing lost when something fails."""

import asyncio
from contextlib import aclosing

import pytest

from gammaray.errors import FailedPreconditionError, InternalError
from orchestrator.cycle.pipeline import run_cycles
from tests.support.cycle_helpers import (
    ConstantGamma,
    ListStore,
    ScriptedTarget,
    make_session,
    perfect_drafter,
)

TOKENS = tuple(range(3, 23))


class GatedStore(ListStore):
    """Writes only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.num_running = 0

    async def append(self, session, token_ids, origins, logprobs=()):
        self.num_running += 1
        assert self.num_running == 1, "writes are never concurrent"
        await self.gate.wait()
        await super().append(session, token_ids, origins)
        self.num_running -= 1


class GatedTarget(ScriptedTarget):
    """Answers only as often as it is let."""

    def __init__(self, tokens, permits: int) -> None:
        super().__init__(tokens)
        self.permits = asyncio.Semaphore(permits)
        self.was_cancelled = False

    async def verify(self, session, draft):
        try:
            await self.permits.acquire()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return await super().verify(session, draft)


def cycles_of(session, target, store, gamma=2):
    return run_cycles(session, perfect_drafter(target), target, store, ConstantGamma(gamma))


async def test_pipeline_cycle_is_seen_only_once_it_is_stored_while_the_next_one_runs():
    store, target = GatedStore(), ScriptedTarget(TOKENS)
    async with aclosing(cycles_of(make_session(), target, store)) as cycles:
        first = asyncio.create_task(anext(cycles))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not first.done()
        assert len(target.proposals) == 2, "the second cycle is at the target, and no third one"
        store.gate.set()
        cycle = await first
        assert tuple(store.token_ids[:3]) == cycle.token_ids


async def test_pipeline_runs_at_most_one_cycle_ahead_of_the_consumer():
    store, target = ListStore(), ScriptedTarget(TOKENS)
    async with aclosing(cycles_of(make_session(), target, store)) as cycles:
        await anext(cycles)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(target.proposals) == 2


@pytest.mark.parametrize("num_written", [0, 3])
async def test_pipeline_failed_write_hides_its_cycle_and_stops(num_written):
    class Fenced(ListStore):
        async def append(self, session, token_ids, origins, logprobs=()):
            if len(self.token_ids) >= num_written:
                raise FailedPreconditionError("another owner")
            await super().append(session, token_ids, origins)

    store, seen = Fenced(), []
    cycles = cycles_of(make_session(), ScriptedTarget(TOKENS), store)
    with pytest.raises(FailedPreconditionError):
        [seen.extend(cycle.token_ids) async for cycle in cycles]
    assert seen == store.token_ids == list(TOKENS[:num_written])


async def test_pipeline_failed_cycle_comes_after_those_before_it():
    class Dying(ScriptedTarget):
        async def verify(self, session, draft):
            if len(self.proposals) == 2:
                raise InternalError("broken")
            return await super().verify(session, draft)

    seen = []
    async with aclosing(cycles_of(make_session(), Dying(TOKENS), ListStore())) as cycles:
        seen += [(await anext(cycles)).token_ids, (await anext(cycles)).token_ids]
        with pytest.raises(InternalError, match="broken"):
            await anext(cycles)
    assert seen == [TOKENS[:3], TOKENS[3:6]]


async def test_pipeline_closing_cancels_the_cycle_that_runs_ahead():
    target = GatedTarget(TOKENS, permits=1)
    async with aclosing(cycles_of(make_session(), target, ListStore())) as cycles:
        await anext(cycles)
        for _ in range(5):
            await asyncio.sleep(0)
    assert target.was_cancelled


async def test_pipeline_cancelling_the_consumer_cancels_the_cycle():
    target = GatedTarget(TOKENS, permits=0)

    async def consume():
        async with aclosing(cycles_of(make_session(), target, ListStore(), 0)) as cycles:
            await anext(cycles)

    task = asyncio.create_task(consume())
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert target.was_cancelled
