"""Responses in a real Redis: their life, their bytes, and a Redis that is gone."""

from __future__ import annotations

import asyncio

import pytest

from gammaray.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError, UnavailableError
from orchestrator.storage import client as storage_client
from orchestrator.storage.client import connect
from orchestrator.storage.keys import StoreBounds, response_keys
from orchestrator.storage.response_store import ResponseStore, StoredResponse
from orchestrator.storage.session_scripts import REQUEST_OVERHEAD
from orchestrator.storage.session_store import RedisStore
from tests.support.workers.redis_helpers import redis_name, running_redis
from tests.support.workers.scripted_workers import make_session

pytestmark = pytest.mark.integration

BEGUN = StoredResponse(b'["input"]', b'{"status": "in_progress"}')
DONE, PIECES = b'{"status": "completed"}', b"[[3, 0]]"


@pytest.fixture(scope="module")
def server():
    with running_redis() as server:
        yield server


@pytest.fixture
async def redis(server):
    client = connect(server.url)
    await client.flushall()
    yield client
    await client.aclose()


def store_of(redis, total: int = 0, share: float = 1.0, ttl_s: int = 60) -> ResponseStore:
    return ResponseStore(redis, ttl_s, StoreBounds(redis, total, share))


async def used(redis, tenant: str = ":") -> int:
    return int(await redis.hget("gammaray:stored:used", tenant) or 0)


async def test_response_begins_ends_and_is_deleted(redis):
    store = store_of(redis)
    await store.create("resp_1", BEGUN)
    assert await store.read("resp_1") == BEGUN
    assert await store.finish("resp_1", DONE, PIECES)
    assert await store.read("resp_1") == StoredResponse(BEGUN.input, DONE, PIECES)
    assert 50_000 < await redis.pttl(response_keys("resp_1")[0]) <= 60_000
    assert await store.delete("resp_1")
    assert not await store.delete("resp_1")
    with pytest.raises(NotFoundError):
        await store.read("resp_1")
    assert await redis.keys("*response*") == []


async def test_end_of_a_deleted_response_does_not_bring_it_back(redis):
    store = store_of(redis)
    await store.create("resp_1", BEGUN)
    await store.delete("resp_1")
    assert not await store.finish("resp_1", DONE, PIECES)
    assert await redis.keys("*response*") == []
    assert await used(redis) == 0


async def test_bytes_are_charged_to_the_tenant_until_deleted(redis):
    store = store_of(redis)
    await store.create("alice:resp_1", BEGUN)
    await store.create("resp_2", BEGUN)
    begun = REQUEST_OVERHEAD + len(BEGUN.input) + len(BEGUN.response)
    assert [await used(redis, tenant) for tenant in ("alice", "", ":")] == [begun, begun, 2 * begun]
    await store.finish("alice:resp_1", DONE, PIECES)
    done = REQUEST_OVERHEAD + len(BEGUN.input) + len(DONE) + len(PIECES)
    assert [await used(redis, tenant) for tenant in ("alice", ":")] == [done, begun + done]
    await store.finish("alice:resp_1", DONE, PIECES)  # as after a lost answer
    assert await used(redis, "alice") == done
    await store.delete("alice:resp_1")
    assert [await used(redis, tenant) for tenant in ("alice", ":")] == [0, begun]


async def test_bounds_refuse_with_a_delay_and_expired_bytes_are_freed(redis):
    one = REQUEST_OVERHEAD + len(BEGUN.input) + len(BEGUN.response)
    store = store_of(redis, total=2 * one, share=0.5, ttl_s=1)
    await store.create("alice:resp_1", BEGUN)
    with pytest.raises(ResourceExhaustedError, match="tenant alice") as refused:
        await store.create("alice:resp_2", BEGUN)
    assert refused.value.retry_after_s == 1
    await store.create("bob:resp_3", BEGUN)
    with pytest.raises(ResourceExhaustedError, match="all tenants"):
        await store.create("resp_4", BEGUN)
    large = StoredResponse(b"x" * 2 * one, b"{}")
    with pytest.raises(InvalidArgumentError) as wrong:
        await store.create("alice:resp_5", large)
    assert wrong.value.field == "input"
    await asyncio.sleep(1.1)
    with pytest.raises(NotFoundError):
        await store.read("alice:resp_1")
    await store.create("alice:resp_6", BEGUN)
    assert await used(redis, "alice") == one


async def test_sessions_and_responses_of_one_name_have_accounts_of_their_own(redis):
    bounds = StoreBounds(redis)
    sessions, responses = RedisStore(redis, 60, bounds=bounds), ResponseStore(redis, 60, bounds)
    await sessions.create(make_session("alice:resp_1", 8, 0, (1, 2, 3)), b"request")
    before = await used(redis, "alice")
    await responses.create("alice:resp_1", BEGUN)
    assert await used(redis, "alice") > before
    await sessions.delete("alice:resp_1")
    assert await responses.read("alice:resp_1") == BEGUN
    await responses.delete("alice:resp_1")
    assert await used(redis) == 0


async def test_end_in_the_background_is_stored_before_close_returns(redis):
    store = store_of(redis)
    await store.create("resp_1", BEGUN)
    store.finish_later("resp_1", DONE, PIECES)
    await store.close()
    assert (await store.read("resp_1")).response == DONE


async def test_redis_that_is_gone_ends_every_call_in_time(server, monkeypatch, caplog):
    monkeypatch.setattr(storage_client, "NUM_RETRIES", 1)
    async with redis_name(server) as (name, url):
        redis = connect(url)
        store = store_of(redis)
        await store.create("resp_1", BEGUN)
        name.reply = "LOADING Redis is loading the dataset in memory"
        calls = [
            store.create("resp_2", BEGUN),
            store.read("resp_1"),
            store.finish("resp_1", DONE, PIECES),
            store.delete("resp_1"),
        ]
        for call in calls:
            with pytest.raises(UnavailableError):
                await asyncio.wait_for(call, 20)
        store.finish_later("resp_1", DONE, PIECES)
        await asyncio.wait_for(store.close(), 20)
        assert "could not be stored" in caplog.text
        await redis.aclose()
