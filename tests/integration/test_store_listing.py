"""Listing sessions: tokens are not read."""

import asyncio
import time
import tracemalloc

import pytest

from gammaray.blocks import TokenLogprobs
from gammaray.errors import NotFoundError
from gammaray.types import FinishReason, TokenOrigin
from gammaray.wire.sessions import SessionState
from orchestrator.access.caller import Caller
from orchestrator.sessions.management import SessionCalls
from orchestrator.storage.session_store import RedisStore
from orchestrator.storage.trace_store import RedisTraceStore
from tests.support.workers.scripted_workers import make_session

pytestmark = [pytest.mark.integration, pytest.mark.each_redis, pytest.mark.usefixtures("empty")]

NUM_SESSIONS, NUM_TOKENS = 1000, 1000


def calls_of(redis, store: RedisStore) -> SessionCalls:
    def release(session_id: str, epoch: int, *, forget: bool = False) -> None:
        pass

    return SessionCalls(store, None, release, RedisTraceStore(redis, 600))  # type: ignore[arg-type]


@pytest.mark.slow
async def test_list_of_long_sessions_reads_no_token(redis):
    """1,000 sessions of 1,000 tokens with log-probabilities: of these a listing needs none."""
    store = RedisStore(redis, 600)
    logprobs = [TokenLogprobs(-1.0, ())] * NUM_TOKENS
    for index in range(NUM_SESSIONS):
        session = make_session(f"acme:{index}", NUM_TOKENS, 0, tuple(range(500)))
        session.num_top_logprobs = 0
        await store.create(session, b"request")
        session.commit([7] * NUM_TOKENS)
        await store.append(session, [7] * NUM_TOKENS, [TokenOrigin.BONUS] * NUM_TOKENS, logprobs)
    calls, before = calls_of(redis, store), await redis.info()
    commands = await redis.info("commandstats")
    tracemalloc.start()
    cpu = time.thread_time()
    found = await calls.recent(1000, Caller(tenant="acme"))
    cpu = time.thread_time() - cpu
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    after, now = await redis.info(), await redis.info("commandstats")

    assert [info.session_id for info in found] == [str(index) for index in reversed(range(NUM_SESSIONS))]
    assert {(info.prompt_tokens, info.emitted_tokens) for info in found} == {(500, NUM_TOKENS)}
    assert {info.finish_reason for info in found} == {FinishReason.LENGTH}
    assert after["used_memory"] > 13 * NUM_SESSIONS * NUM_TOKENS
    assert after["total_net_output_bytes"] - before["total_net_output_bytes"] < 2**18
    assert now["cmdstat_hmget"]["calls"] - commands["cmdstat_hmget"]["calls"] == NUM_SESSIONS
    for command in ("get", "getrange", "hgetall", "strlen"):
        assert now.get(f"cmdstat_{command}") == commands.get(f"cmdstat_{command}")
    assert peak < 50 * 2**20
    assert cpu < 1, "without tracing of allocations it takes some 30 ms"


async def test_sessions_exist_until_they_are_deleted_or_expire(redis):
    store = RedisStore(redis, 600)
    names = [f"acme:{index}" for index in range(450)]  # more than one page
    for name in names[::2]:
        await store.create(make_session(name), b"request")
    assert await store.exist([]) == []
    assert await store.exist(names) == [index % 2 == 0 for index in range(450)]
    await store.delete("acme:0")
    await redis.pexpire("gammaray:session:{acme:448}", 1)
    await asyncio.sleep(0.01)
    assert await store.exist(["acme:448", "acme:2", "acme:0", "other:2"]) == [False, True, False, False]


async def test_summary_equals_the_fields_of_the_session(redis):
    store = RedisStore(redis, 600)
    calls, caller = calls_of(redis, store), Caller(tenant="acme")
    for name in ("a", "b", "c"):
        session = make_session(f"acme:{name}", 8)
        await store.create(session, b"request")
        session.commit([1, 2])
        await store.append(session, [1, 2], [TokenOrigin.BONUS] * 2)
        if name == "b":
            await store.detach(session)
    await store.cancel("acme:c")
    listed = {info.session_id: info for info in await calls.recent(0, caller)}
    assert {name: info.state for name, info in listed.items()} == {
        "a": SessionState.RUNNING,
        "b": SessionState.DETACHED,
        "c": SessionState.FINISHED,
    }
    for name, info in listed.items():
        stored = await store.read(f"acme:{name}")
        assert (info.turn, info.epoch, info.seed) == (stored.turn, stored.epoch, stored.seed)
        assert (info.prompt_tokens, info.emitted_tokens) == (len(make_session().prompt), 2)
        assert info.finish_reason is stored.finish_reason
        assert 0 < info.expires_in_ms <= 600_000
        assert info.created_ms == stored.created_ms > 0
    assert await calls.recent(0, Caller(tenant="other")) == []
    with pytest.raises(NotFoundError):
        await store.summary("acme:d")
