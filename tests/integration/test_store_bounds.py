"""Bytes of stored sessions and responses in a real Redis: shared requests, bounds, and freeing."""

import asyncio
from dataclasses import replace

import pytest

from gammaray.demo_pair import resolve_model
from gammaray.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gammaray.types import FinishReason, GenerationRequest, SamplingParams
from orchestrator.access.caller import Caller
from orchestrator.sessions.lifecycle import SessionManager
from orchestrator.storage import client as storage_client
from orchestrator.storage.client import connect
from orchestrator.storage.keys import DEFAULT_TOTAL, Keys, StoreBounds
from orchestrator.storage.response_store import ResponseStore, StoredResponse
from orchestrator.storage.session_scripts import REQUEST_OVERHEAD, SESSION_OVERHEAD
from orchestrator.storage.session_store import RedisStore
from orchestrator.storage.trace_store import RedisTraceStore
from orchestrator.text.tokenizer import Tokenizer
from tests.support.workers.redis_helpers import redis_name
from tests.support.workers.resume_helpers import any_model
from tests.support.workers.scripted_workers import commit, make_session

pytestmark = [pytest.mark.integration, pytest.mark.each_redis, pytest.mark.usefixtures("empty")]

ALICE = Caller(tenant="alice")
PLAIN = 5
"""Bytes of one record without log-probabilities."""


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(resolve_model("demo"))


def store_of(redis, total: int = 0, share: float = 1.0, ttl_s: int = 60) -> RedisStore:
    return RedisStore(redis, ttl_s, bounds=StoreBounds(redis, total, share))


def opener_of(store: RedisStore, tokenizer: Tokenizer) -> SessionManager:
    return SessionManager(store, tokenizer, any_model)


def session_of(name: str, max_tokens: int = 8, prompt: tuple[int, ...] = (1, 2, 3)):
    return make_session(name, max_tokens, 0, prompt)


async def used(redis, tenant: str = ":") -> int:
    """Return the bytes that are charged to a tenant, or to all."""
    return int(await redis.hget("gammaray:stored:used", tenant) or 0)


async def requests(redis) -> list[bytes]:
    return sorted(key for key in await redis.keys("gammaray:request:*") if not key.endswith(b":users"))


async def test_choices_of_one_request_share_its_prompt(redis, tokenizer):
    prompt = tuple((tokenizer.encode("def read(path):\n    return open(path).read()\n" * 40) * 100)[:32_000])
    store = store_of(redis)
    opener, before = opener_of(store, tokenizer), (await redis.info("memory"))["used_memory"]
    names = []
    for index in range(128):
        request = GenerationRequest(
            prompt=prompt, sampling=SamplingParams(sample_index=index, temperature=1.0)
        )
        names.append((await opener.open(request, 32_768, ALICE)).session.session_id)
    taken = (await redis.info("memory"))["used_memory"] - before
    (key,) = await requests(redis)
    assert len(prompt) == 32_000
    assert 0 <= await redis.strlen(key) - 4 * len(prompt) < 200
    assert taken < 1 * 2**20
    for index in (0, 77, 127):
        stored = await store.read(names[index])
        assert (stored.sample_index, stored.prompt) == (index, prompt)
    assert len({(await store.read(name)).seed for name in names}) == 128


async def test_requests_are_not_shared_between_tenants_nor_when_they_differ(redis, tokenizer):
    opener = opener_of(store_of(redis), tokenizer)
    request = GenerationRequest(prompt="def main():")
    for caller, asked in [
        (ALICE, request),
        (ALICE, replace(request, sampling=SamplingParams(sample_index=1))),
        (Caller(tenant="bob"), request),
        (Caller(), request),
        (ALICE, replace(request, stop=("x",))),
        (ALICE, replace(request, prompt="def other():")),
    ]:
        await opener.open(asked, 2048, caller)
    tenants = [key.decode().split(":")[2].split("/")[0] for key in await requests(redis)]
    assert sorted(tenants) == ["", "alice", "alice", "alice", "bob"]


async def test_request_is_deleted_with_its_last_session(redis):
    store = store_of(redis)
    for name in ("alice:a", "alice:b", "alice:c"):
        await store.create(session_of(name), b"request")
    size = 4 + len(b"request") + 12 + REQUEST_OVERHEAD
    assert await used(redis, "alice") == size + 3 * (SESSION_OVERHEAD + 8 * PLAIN)
    assert await store.delete("alice:a")
    assert await store.delete("alice:b")
    assert len(await requests(redis)) == 1
    assert await used(redis, "alice") == size + SESSION_OVERHEAD + 8 * PLAIN
    assert (await store.read("alice:c")).prompt == (1, 2, 3)
    assert await store.delete("alice:c")
    left = [key for key in await redis.keys("gammaray:*") if key != b"gammaray:epoch"]
    assert left == []


async def test_next_turn_releases_the_request_of_the_previous_turn(redis):
    store = store_of(redis)
    for name in ("alice:a", "alice:b"):
        session = session_of(name, max_tokens=1)
        await store.create(session, b"request")
        await commit(store, session, [4])
    for name, count in (("alice:a", 2), ("alice:b", 1)):
        turn = session_of(name, 2, (1, 2, 3, 4, 5))
        await store.next_turn(turn, b"second", await store.read(name))
        assert len(await requests(redis)) == count
    size = 4 + len(b"second") + 20 + REQUEST_OVERHEAD
    assert await used(redis) == size + 2 * (SESSION_OVERHEAD + 2 * PLAIN)


@pytest.mark.slow
async def test_expired_sessions_and_requests_free_their_bytes(redis):
    store = store_of(redis, ttl_s=1)
    short, long = session_of("alice:short"), session_of("alice:long", 10**4)
    await store.create(short, b"request")
    await store.create(long, b"request")
    await store.create(session_of("alice:alone", prompt=(9,)), b"request")
    for token in range(15):  # a running session renews its own keys and the shared request
        await asyncio.sleep(0.1)
        await commit(store, long, [token])
    with pytest.raises(NotFoundError):
        await store.read("alice:short")
    assert (await store.read("alice:long")).prompt == (1, 2, 3)
    assert len(await requests(redis)) == 1
    await store.create(session_of("bob:new", prompt=(7,)), b"request")  # takes off what has expired
    one = SESSION_OVERHEAD + REQUEST_OVERHEAD + 4 + len(b"request")
    assert await used(redis, "alice") == one + 12 + 10**4 * PLAIN
    assert await used(redis, "bob") == one + 4 + 8 * PLAIN
    assert await used(redis) == await used(redis, "alice") + await used(redis, "bob")
    await asyncio.sleep(1.2)
    await store.create(session_of("bob:newer", prompt=(7,)), b"request")
    assert await used(redis) == one + 4 + 8 * PLAIN
    assert await redis.zcard("gammaray:stored") == 2


async def test_tenant_over_its_bound_is_rejected_with_a_retry_delay(redis):
    need = SESSION_OVERHEAD + 8 * PLAIN
    own = REQUEST_OVERHEAD + 4 + len(b"request") + 12
    store = store_of(redis, 2 * (own + 3 * need), 0.5)
    for index in range(3):
        session = session_of(f"alice:{index}")
        await store.create(session, b"request")
        await commit(store, session, [1, 2, 3, 4, 5, 6, 7, 8])  # ended: nothing is set aside any more
    with pytest.raises(ResourceExhaustedError) as refused:
        await store.create(session_of("alice:more"), b"request")
    assert 50 <= refused.value.retry_after_s <= 60
    for part in ("tenant alice", f"{own + 3 * need} of {own + 3 * need} bytes", str(need)):
        assert part in str(refused.value)
    with pytest.raises(NotFoundError):
        await store.read("alice:more")
    for index in range(3):
        await store.create(session_of(f"bob:{index}"), b"request")
    with pytest.raises(ResourceExhaustedError, match="of all tenants: "):
        await store.create(session_of("carol:0"), b"request")
    await store.delete("alice:1")
    await store.create(session_of("alice:more"), b"request")
    assert await used(redis) == 2 * (own + 3 * need)


async def test_request_that_can_never_fit_is_an_argument_error(redis):
    need = SESSION_OVERHEAD + 8 * PLAIN + REQUEST_OVERHEAD + 4 + len(b"request") + 12
    with pytest.raises(
        InvalidArgumentError, match=f"max_tokens: got .*{need} bytes, allowed: {need - 1} bytes"
    ):
        await store_of(redis, need - 1).create(session_of("a"), b"request")


async def test_takeover_of_a_session_replaced_meanwhile_is_rejected(redis, tokenizer):
    class Slow(RedisStore):
        """Another client deletes the session, and begins one of its name, before it is taken over."""

        async def take_over(self, session_id, digest=""):
            await self.delete(session_id)
            other = replace(asked, prompt="class A:", sampling=SamplingParams(seed=2))
            await opener_of(store_of(redis), tokenizer).open(other, 2048, ALICE)
            return await super().take_over(session_id, digest)

    asked = GenerationRequest(prompt="def main():", sampling=SamplingParams(seed=1), session_id="mine")
    await opener_of(store_of(redis), tokenizer).open(asked, 2048, ALICE)
    with pytest.raises(FailedPreconditionError):
        await opener_of(Slow(redis, 60), tokenizer).open(replace(asked, resume_from=0), 2048, ALICE)


async def test_many_expired_sessions_are_freed_before_a_request_is_rejected(redis):
    """More than one script takes off at once."""
    many = store_of(redis)
    for start in range(0, 2500, 20):
        await asyncio.gather(*(many.create(session_of(f"alice:{start + i}"), b"request") for i in range(20)))
    assert await used(redis) > 2500 * SESSION_OVERHEAD
    await redis.delete(*await redis.keys("gammaray:session:*"), *await redis.keys("gammaray:request:*"))
    for item in await redis.zrange("gammaray:stored", 0, -1):  # as if a minute had passed
        await redis.zincrby("gammaray:stored", -61_000, item)
    store = store_of(redis, SESSION_OVERHEAD + REQUEST_OVERHEAD + 100)
    await store.create(session_of("bob:a"), b"request")
    assert await used(redis) == SESSION_OVERHEAD + REQUEST_OVERHEAD + 4 + len(b"request") + 12 + 8 * PLAIN


async def test_bytes_for_future_tokens_are_reserved_while_a_turn_has_an_owner(redis):
    own = SESSION_OVERHEAD + REQUEST_OVERHEAD + 4 + len(b"request") + 12
    store = store_of(redis, 2 * own + 1000 * PLAIN)
    running = session_of("alice:a", 900)
    await store.create(running, b"request")
    assert await used(redis) == own + 900 * PLAIN
    with pytest.raises(ResourceExhaustedError) as refused:
        await store.create(session_of("alice:b", 900, (4, 5, 6)), b"request")
    assert refused.value.retry_after_s == 1  # a turn that ends gives up what it has not used
    for token in range(100):
        await commit(store, running, [token])
    assert await used(redis) == own + 900 * PLAIN
    await store.detach(running)
    assert await used(redis) == own + 100 * PLAIN
    other = session_of("alice:b", 900, (4, 5, 6))
    await store.create(other, b"request")
    with pytest.raises(ResourceExhaustedError, match="needs 4000 more"):
        await store.take_over("alice:a")
    assert (await store.read("alice:a")).epoch == running.epoch
    await commit(store, other, [1])
    await store.cancel("alice:b")
    running.epoch = await store.take_over("alice:a")
    while running.finish_reason is None:
        await commit(store, running, [7])
    assert running.finish_reason is FinishReason.LENGTH
    assert await used(redis) == 2 * own + 901 * PLAIN
    assert await redis.hget("gammaray:stored:used", ":+") is None


async def test_bound_follows_the_memory_limit_of_redis(redis):
    bounds = StoreBounds(redis, tenant_share=0.25)
    assert await bounds.of("alice:a") == (DEFAULT_TOTAL // 4, DEFAULT_TOTAL)
    assert await bounds.of("a") == (DEFAULT_TOTAL, DEFAULT_TOTAL)
    await redis.config_set("maxmemory", 100 * 2**20)
    try:
        assert await StoreBounds(redis).of("a") == (50 * 2**20, 50 * 2**20)
        assert await StoreBounds(redis, 7).of("a") == (7, 7)
    finally:
        await redis.config_set("maxmemory", 0)


async def test_cycle_records_are_charged_and_keep_bytes_free_for_sessions(redis):
    own = SESSION_OVERHEAD + REQUEST_OVERHEAD + 4 + len(b"request") + 12 + 8 * PLAIN
    bounds = StoreBounds(redis, 2 * own, 1.0)
    store, traces = RedisStore(redis, 60, bounds=bounds), RedisTraceStore(redis, 60, bounds)
    session = session_of("alice:a")
    await store.create(session, b"request")
    assert await traces.append("alice:a", session.epoch, b"\n\x02\x08\x01" * 25)
    assert await used(redis) == own + 100
    half = b"\n\x02\x08\x01" * (own // 8)
    assert not await traces.append("alice:a", session.epoch, half)  # past three quarters
    assert len((await traces.read("alice:a")).cycles) == 25
    assert await used(redis) == own + 100
    assert await store.delete("alice:a")
    assert await used(redis) == 0


async def test_redis_at_its_memory_limit_refuses_and_recovers(redis):
    store = store_of(redis, 2**30)
    session = session_of("alice:a", 10**5)
    await store.create(session, b"request")
    await commit(store, session, [1])
    taken = (await redis.info("memory"))["used_memory"]
    await redis.config_set("maxmemory", taken - 2**16)
    try:
        with pytest.raises(ResourceExhaustedError, match="out of memory") as refused:
            await store.create(session_of("alice:b", prompt=tuple(range(5000))), b"request")
        assert refused.value.retry_after_s >= 1
        with pytest.raises(ResourceExhaustedError, match="out of memory"):
            await commit(store, session, [2])
        assert (await store.read("alice:a")).token_ids == (1,)  # reading, ending and deleting need no memory
        await store.detach(session)
        await store.cancel("alice:a")
        assert (await store.summary("alice:a")).finish_reason is FinishReason.CANCELLED
        assert await store.delete("alice:a")
    finally:
        await redis.config_set("maxmemory", 0)
    await store.create(session_of("alice:b"), b"request")


BEGUN = StoredResponse(b'["input"]', b'{"status": "in_progress"}')
DONE = b'{"status": "completed"}'
SHORT = b'{"status": "failed"}'


def responses_of(redis, total: int = 0, share: float = 1.0, ttl_s: int = 60) -> ResponseStore:
    return ResponseStore(redis, ttl_s, StoreBounds(redis, total, share))


async def test_response_begins_ends_and_is_deleted(redis):
    store = responses_of(redis)
    await store.create("resp_1", BEGUN, 0)
    assert await store.read("resp_1") == BEGUN
    assert await store.finish("resp_1", DONE, SHORT) == "whole"
    assert await store.read("resp_1") == StoredResponse(BEGUN.input, DONE)
    assert 50_000 < await redis.pttl(Keys().response("resp_1")[0]) <= 60_000
    assert await store.delete("resp_1")
    assert not await store.delete("resp_1")
    assert await store.finish("resp_1", DONE, SHORT) == "gone"
    with pytest.raises(NotFoundError):
        await store.read("resp_1")
    assert await redis.keys("*response*") == []
    assert await used(redis) == 0
    await store.create("resp_1", BEGUN, 0)
    store.finish_later("resp_1", DONE, SHORT)
    await store.close()
    assert (await store.read("resp_1")).response == DONE


async def test_bytes_are_charged_to_the_tenant_until_deleted(redis):
    store = responses_of(redis)
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
    store = responses_of(redis, total=2 * one, share=0.5, ttl_s=1)
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
    store = responses_of(redis, total, share=0.5)
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
    store = responses_of(redis, 2**20)
    await store.create("resp_1", BEGUN, 1000)
    before = await used(redis)
    await store.create("resp_1", BEGUN, 1000)  # as after a lost answer
    assert await used(redis) == before
    assert await store.finish("resp_1", b"x" * 50_000, SHORT) == "whole"
    assert 50_000 < await used(redis) < 52_000
    assert await redis.hget("gammaray:stored:used", ":+") is None  # nothing is set aside any more


async def test_room_that_alone_exceeds_a_bound_names_its_field(redis):
    with pytest.raises(InvalidArgumentError) as wrong:
        await responses_of(redis, 2**20).create("resp_1", BEGUN, 2**21)
    assert wrong.value.field == "max_output_tokens"
    assert await used(redis) == 0


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


async def test_redis_that_is_gone_ends_every_call_in_time(redis_server, monkeypatch, caplog):
    monkeypatch.setattr(storage_client, "NUM_RETRIES", 1)
    async with redis_name(redis_server) as (name, url):
        redis = connect(url)
        store = responses_of(redis)
        await store.create("resp_1", BEGUN, 0)
        name.reply = "LOADING Redis is loading the dataset in memory"
        calls = [
            store.create("resp_2", BEGUN, 0),
            store.read("resp_1"),
            store.finish("resp_1", DONE, SHORT),
            store.delete("resp_1"),
        ]
        for call in calls:
            with pytest.raises(UnavailableError, match="refuses commands: LOADING"):
                await asyncio.wait_for(call, 20)
        store.finish_later("resp_1", DONE, SHORT)
        await asyncio.wait_for(store.close(), 20)
        assert "could not be stored" in caplog.text
        await redis.aclose()
