"""The registry, and two clusters on one Redis: with own prefixes they share nothing, or one is refused."""

import itertools

import pytest

from gammaray.errors import InvalidArgumentError, NotFoundError
from gammaray.types import ProcessStatus, SpeculationTotals
from orchestrator import status as presence
from orchestrator.status import Presence
from orchestrator.storage import registry as registry_module
from orchestrator.storage.keys import Keys
from orchestrator.storage.registry import RedisRegistry, check_unused
from orchestrator.storage.response_store import ResponseStore, StoredResponse
from orchestrator.storage.session_store import RedisStore
from orchestrator.storage.trace_store import RedisTraceStore
from services.process.registry import Announcer
from tests.support.workers.scripted_workers import make_session, until_so

pytestmark = [pytest.mark.integration, pytest.mark.each_redis, pytest.mark.usefixtures("empty")]

A, B = Keys("prod.gammaray"), Keys("test.gammaray")


async def test_clusters_with_prefixes_of_their_own_share_nothing(redis_server, redis):
    announcers = [Announcer(redis_server.url, "target", f"{keys.prefix}:1", keys.prefix) for keys in (A, B)]
    try:
        for keys in (A, B):
            store = RedisStore(redis, 60, keys=keys)
            await store.create(make_session("alice:s", 8, 0, (1, 2, 3)), keys.prefix.encode())
            await ResponseStore(redis, 60, keys=keys).create("alice:r", StoredResponse(b"[]", b"{}"), 10)
            await RedisRegistry(redis, keys).announce("one", keys.prefix.encode(), 60)
        for announcer in announcers:
            await announcer.start()
        names = {key.decode() for key in await redis.keys()}
        assert all(name.startswith((f"{A.prefix}:", f"{B.prefix}:")) for name in names), names
        for keys in (A, B):
            assert (await RedisRegistry(redis, keys).workers())["target"] == {f"{keys.prefix}:1"}
            assert await RedisRegistry(redis, keys).orchestrators() == {"one": keys.prefix.encode()}
            assert await RedisStore(redis, 60, keys=keys).running() == ["alice:s"]
        store = RedisStore(redis, 60, keys=A)
        assert (await store.read("alice:s")).request == A.prefix.encode()
        assert await store.delete("alice:s")
        assert await ResponseStore(redis, 60, keys=A).delete("alice:r")
        with pytest.raises(NotFoundError):
            await store.read("alice:s")
        assert (await RedisStore(redis, 60, keys=B).read("alice:s")).request == B.prefix.encode()
        assert [s.session_id for s in await RedisStore(redis, 60, keys=B).recent("alice", 9)] == ["alice:s"]
        assert await RedisTraceStore(redis, 60, keys=B).append("alice:s", 2**52, b"record")
    finally:
        for announcer in announcers:
            await announcer.withdraw()


async def test_second_cluster_with_the_same_keys_is_refused(redis_server, redis, monkeypatch):
    monkeypatch.setattr(registry_module, "UNUSED_WAIT_S", 0.3)
    monkeypatch.setattr(registry_module, "LOOK_PERIOD_S", 0.05)
    registry = RedisRegistry(redis, A)
    await check_unused(redis_server.url, A)
    await registry.announce("one", b"state", 60)
    with pytest.raises(InvalidArgumentError) as refused:
        await check_unused(redis_server.url, A)
    assert refused.value.field == "redis_url"
    assert "GAMMARAY_REDIS_PREFIX" in refused.value.allowed
    assert "1 orchestrators" in refused.value.allowed
    assert redis_server.url not in str(refused.value)  # it has a password
    await check_unused(redis_server.url, B)
    monkeypatch.setattr(registry_module, "UNUSED_WAIT_S", 30.0)
    await registry.announce("one", b"state", 0.5)  # of a cluster that was killed
    await check_unused(redis_server.url, A)


def state(pid, cycles=0):
    totals = SpeculationTotals(cycles=cycles)
    return ProcessStatus("orchestrator", pid, "", "demo", True, 1, "127.0.0.1:9", speculation_totals=totals)


async def test_entries_show_the_present_state_until_the_end_and_expire_unless_renewed(redis, monkeypatch):
    monkeypatch.setattr(presence, "REFRESH_S", 0.05)
    cycles = itertools.count()
    first = Presence(RedisRegistry(redis), lambda: state(1, next(cycles)))
    other = Presence(RedisRegistry(redis), lambda: state(2))

    async def cycles_after(number):
        return [one for one in await other.others() if one.speculation_totals.cycles > number]

    await first.start()
    await other.start()
    assert await until_so(first.others) == [state(2)]
    (seen,) = await until_so(lambda: cycles_after(-1))
    assert await until_so(lambda: cycles_after(seen.speculation_totals.cycles))
    for key in await redis.keys("gammaray:orchestrator:*"):
        assert 0 < await redis.pttl(key) <= presence.ENTRY_S * 1e3
    await first.stop()
    assert await other.others() == []
    await other.stop()
