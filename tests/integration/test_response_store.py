"""Responses in a real Redis: their life, their bytes, and a Redis that is gone."""

import asyncio

import pytest

from gammaray.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError, UnavailableError
from orchestrator.storage import client as storage_client
from orchestrator.storage.client import connect
from orchestrator.storage.keys import Keys, StoreBounds
from orchestrator.storage.response_store import ResponseStore, StoredResponse
from orchestrator.storage.session_scripts import REQUEST_OVERHEAD
from orchestrator.storage.session_store import RedisStore
from tests.support.workers.redis_helpers import redis_name
from tests.support.workers.scripted_workers import make_session

pytestmark = [pytest.mark.integration, pytest.mark.each_redis, pytest.mark.usefixtures("empty")]

BEGUN = StoredResponse(b'["input"]', b'{"status": "in_progress"}')
DONE = b'{"status": "completed"}'
SHORT = b'{"status": "failed"}'


def store_of(redis, total: int = 0, share: float = 1.0, ttl_s: int = 60) -> ResponseStore:
    return ResponseStore(redis, ttl_s, StoreBounds(redis, total, share))


async def used(redis, tenant: str = ":") -> int:
    return int(await redis.hget("gammaray:stored:used", tenant) or 0)


async def test_response_begins_ends_and_is_deleted(redis):
    store = store_of(redis)
    await store.create("resp_1", BEGUN, 0)
    assert await store.read("resp_1") == BEGUN
    assert await store.finish("resp_1", DONE, SHORT) == "whole"
    assert await store.read("resp_1") == StoredResponse(BEGUN.input, DONE)
    assert 50_000 < await redis.pttl(Keys().response("resp_1")[0]) <= 60_000
    assert await store.delete("resp_1")
    assert not await store.delete("resp_1")
    with pytest.raises(NotFoundError):
        await store.read("resp_1")
    assert await redis.keys("*response*") == []


async def test_end_of_a_deleted_response_does_not_bring_it_back(redis):
    store = store_of(redis)
    await store.create("resp_1", BEGUN, 0)
    await store.delete("resp_1")
    assert await store.finish("resp_1", DONE, SHORT) == "gone"
    assert await redis.keys("*response*") == []
    assert await used(redis) == 0


async def test_bytes_are_charged_to_the_tenant_until_deleted(redis):
    store = store_of(redis)
    await store.create("alice:resp_1", BEGUN, 0)
    await store.create("resp_2", BEGUN, 0)
    begun = REQUEST_OVERHEAD + len(BEGUN.input) + len(BEGUN.response)
    assert [await used(redis, tenant) for tenant in ("alice", "", ":")] == [begun, begun, 2 * begun]
    await store.finish("alice:resp_1", DONE, SHORT)
    done = REQUEST_OVERHEAD + len(BEGUN.input) + len(DONE)
    assert [await used(redis, tenant) for tenant in ("alice", ":")] == [done, begun + done]
    await store.finish("alice:resp_1", DONE, SHORT)  # as after a lost answer
    assert await used(redis, "alice") == done
    await store.delete("alice:resp_1")
    assert [await used(redis, tenant) for tenant in ("alice", ":")] == [0, begun]


async def test_bounds_refuse_with_a_delay_and_expired_bytes_are_freed(redis):
    one = REQUEST_OVERHEAD + len(BEGUN.input) + len(BEGUN.response)
    store = store_of(redis, total=2 * one, share=0.5, ttl_s=1)
    await store.create("alice:resp_1", BEGUN, 0)
    with pytest.raises(ResourceExhaustedError, match="tenant alice") as refused:
        await store.create("alice:resp_2", BEGUN, 0)
    assert refused.value.retry_after_s == 1
    await store.create("bob:resp_3", BEGUN, 0)
    with pytest.raises(ResourceExhaustedError, match="all tenants"):
        await store.create("resp_4", BEGUN, 0)
    large = StoredResponse(b"x" * 2 * one, b"{}")
    with pytest.raises(InvalidArgumentError) as wrong:
        await store.create("alice:resp_5", large, 0)
    assert wrong.value.field == "input"
    await asyncio.sleep(1.1)
    with pytest.raises(NotFoundError):
        await store.read("alice:resp_1")
    await store.create("alice:resp_6", BEGUN, 0)
    assert await used(redis, "alice") == one


async def test_ends_never_exceed_the_bounds(redis):
    total = 2**20
    store = store_of(redis, total, share=0.5)
    names = [f"acme:resp_{number}" for number in range(40)]
    calls = (store.create(name, BEGUN, 16_000) for name in names)
    made = await asyncio.gather(*calls, return_exceptions=True)
    refused = [error for error in made if error is not None]
    assert refused
    assert all(isinstance(error, ResourceExhaustedError) and error.retry_after_s > 0 for error in refused)
    begun = [name for name, error in zip(names, made, strict=True) if error is None]
    assert 25 < len(begun) < 35
    assert await used(redis) <= total / 2
    within = begun[::2]
    ends = {name: b"x" * (15_000 if name in within else 2**19) for name in begun}
    finished = await asyncio.gather(*(store.finish(name, end, SHORT) for name, end in ends.items()))
    assert dict(zip(ends, finished, strict=True)) == {
        name: "whole" if name in within else "cut" for name in begun
    }
    assert await used(redis) <= total / 2
    for name in begun:
        stored = await store.read(name)
        assert stored.response == (ends[name] if name in within else SHORT)
    kept = sum(
        REQUEST_OVERHEAD + len(BEGUN.input) + len(stored.response)
        for stored in [await store.read(name) for name in begun]
    )
    assert await used(redis, "acme") == kept
    await store.create("other:resp_0", BEGUN, total // 4)  # other tenants have their share


async def test_end_beyond_its_room_is_stored_while_there_is_space(redis):
    store = store_of(redis, 2**20)
    await store.create("resp_1", BEGUN, 1000)
    assert await store.finish("resp_1", b"x" * 50_000, SHORT) == "whole"
    assert 50_000 < await used(redis) < 52_000
    assert await redis.hget("gammaray:stored:used", ":+") is None  # nothing is set aside any more


async def test_room_that_alone_exceeds_a_bound_names_its_field(redis):
    with pytest.raises(InvalidArgumentError) as wrong:
        await store_of(redis, 2**20).create("resp_1", BEGUN, 2**21)
    assert wrong.value.field == "max_output_tokens"
    assert await used(redis) == 0


async def test_create_that_is_sent_again_after_a_lost_answer_reserves_once(redis):
    store = store_of(redis, 20_000)
    await store.create("resp_1", BEGUN, 15_000)
    before = await used(redis)
    await store.create("resp_1", BEGUN, 15_000)
    assert await used(redis) == before


async def test_room_is_given_back_when_the_orchestrator_has_died(redis):
    bounds = StoreBounds(redis)
    sessions, responses = RedisStore(redis, 60, 0.05, bounds), ResponseStore(redis, 60, bounds)
    await sessions.create(make_session("alice:resp_1", 8, 0, (1, 2, 3)), b"request")
    await responses.create("alice:resp_1", BEGUN, 100_000)
    assert await used(redis, "alice") > 100_000
    assert await sessions.reap("alice:resp_1") is None
    await asyncio.sleep(0.1)
    assert await sessions.reap("alice:resp_1")
    assert await used(redis, "alice") < 5000
    assert await redis.hget("gammaray:stored:used", ":+") is None
    # An owner that was only slow: its end is checked, and charged.
    assert await responses.finish("alice:resp_1", DONE, SHORT) == "whole"


async def test_sessions_and_responses_of_one_name_have_accounts_of_their_own(redis):
    bounds = StoreBounds(redis)
    sessions, responses = RedisStore(redis, 60, bounds=bounds), ResponseStore(redis, 60, bounds)
    await sessions.create(make_session("alice:resp_1", 8, 0, (1, 2, 3)), b"request")
    before = await used(redis, "alice")
    await responses.create("alice:resp_1", BEGUN, 0)
    assert await used(redis, "alice") > before
    await sessions.delete("alice:resp_1")
    assert await responses.read("alice:resp_1") == BEGUN
    await responses.delete("alice:resp_1")
    assert await used(redis) == 0


async def test_end_in_the_background_is_stored_before_close_returns(redis):
    store = store_of(redis)
    await store.create("resp_1", BEGUN, 0)
    store.finish_later("resp_1", DONE, SHORT)
    await store.close()
    assert (await store.read("resp_1")).response == DONE


async def test_redis_that_is_gone_ends_every_call_in_time(redis_server, monkeypatch, caplog):
    monkeypatch.setattr(storage_client, "NUM_RETRIES", 1)
    async with redis_name(redis_server) as (name, url):
        redis = connect(url)
        store = store_of(redis)
        await store.create("resp_1", BEGUN, 0)
        name.reply = "LOADING Redis is loading the dataset in memory"
        calls = [
            store.create("resp_2", BEGUN, 0),
            store.read("resp_1"),
            store.finish("resp_1", DONE, SHORT),
            store.delete("resp_1"),
        ]
        for call in calls:
            with pytest.raises(UnavailableError):
                await asyncio.wait_for(call, 20)
        store.finish_later("resp_1", DONE, SHORT)
        await asyncio.wait_for(store.close(), 20)
        assert "could not be stored" in caplog.text
        await redis.aclose()
