"""Two clusters on one Redis database: with prefixes of their own they share nothing; else one is refused."""

import pytest

from gammaray.errors import InvalidArgumentError, NotFoundError
from orchestrator.storage import registry as registry_module
from orchestrator.storage.client import connect
from orchestrator.storage.keys import Keys
from orchestrator.storage.registry import RedisRegistry, check_unused
from orchestrator.storage.response_store import ResponseStore, StoredResponse
from orchestrator.storage.session_store import RedisStore
from orchestrator.storage.trace_store import RedisTraceStore
from services.process.registry import Announcer
from tests.support.workers.scripted_workers import make_session

pytestmark = [pytest.mark.integration, pytest.mark.each_redis]

A, B = Keys("prod.gammaray"), Keys("test.gammaray")


async def test_clusters_with_prefixes_of_their_own_share_nothing(redis_server):
    redis = connect(redis_server.url)
    await redis.flushall()
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
        await redis.aclose()


async def test_second_cluster_with_the_same_keys_is_refused(redis_server, monkeypatch):
    monkeypatch.setattr(registry_module, "UNUSED_WAIT_S", 0.3)
    monkeypatch.setattr(registry_module, "LOOK_PERIOD_S", 0.05)
    redis = connect(redis_server.url)
    await redis.flushall()
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
    await redis.aclose()
