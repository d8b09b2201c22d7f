"""Orchestrators find each other in the registry; entries end at shutdown or when not renewed."""

import itertools

import pytest

from gammaray.types import ProcessStatus, SpeculationTotals
from orchestrator import status as presence
from orchestrator.status import Presence
from orchestrator.storage.registry import RedisRegistry
from tests.support.workers.scripted_workers import until_so

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("empty")]


def state(pid, cycles=0):
    totals = SpeculationTotals(cycles=cycles)
    return ProcessStatus("orchestrator", pid, "", "demo", True, 1, "127.0.0.1:9", speculation_totals=totals)


async def test_orchestrators_publish_their_state_in_the_registry(redis, monkeypatch):
    monkeypatch.setattr(presence, "REFRESH_S", 0.05)
    cycles = itertools.count()
    first = Presence(RedisRegistry(redis), lambda: state(1, next(cycles)))
    second = Presence(RedisRegistry(redis), lambda: state(2))
    await first.start()
    await second.start()
    assert await until_so(first.others) == [state(2)]
    (seen,) = await until_so(second.others)

    async def later():
        return [
            s for s in await second.others() if s.speculation_totals.cycles > seen.speculation_totals.cycles
        ]

    assert await until_so(later)
    await first.stop()
    assert await second.others() == []
    await second.stop()


async def test_orchestrator_that_stops_renewing_its_entry_expires(redis, monkeypatch):
    monkeypatch.setattr(presence, "REFRESH_S", 3600)
    silent = Presence(RedisRegistry(redis), lambda: state(1))
    await silent.start()
    other = Presence(RedisRegistry(redis), lambda: state(2))
    assert await until_so(other.others) == [state(1)]
    (key,) = await redis.keys("gammaray:orchestrator:*")
    assert 0 < await redis.pttl(key) <= presence.ENTRY_S * 1e3
    assert await redis.pexpire(key, 1)

    async def is_gone():
        return not await other.others()

    assert await until_so(is_gone)
    await silent.stop()
