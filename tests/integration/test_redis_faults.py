"""Faults of Redis: failovers by name or Sentinel, error replies, and a private server that is killed."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import redis as sync_redis
import uvloop

from gammaray.deploy import redis_connection
from gammaray.deploy.redis_connection import address_of
from gammaray.errors import (
    GammarayError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from gammaray.types import ProcessStatus, TokenOrigin
from orchestrator.launcher import redis_server
from orchestrator.status import Presence
from orchestrator.storage.client import (
    CHECK_TIMEOUT_S,
    BatchedScript,
    answer,
    check_redis,
    connect,
    wait_for_redis,
)
from orchestrator.storage.registry import RedisRegistry
from orchestrator.storage.session_store import RedisStore
from orchestrator.workers.fleet import Fleet
from services.process.registry import Announcer
from tests.support.workers.redis_helpers import (
    RedisName,
    configured_redis,
    follow,
    port_of,
    redis_name,
    replicated,
    running_redis,
    wait_until,
)
from tests.support.workers.scripted_workers import commit, make_session, scripted, until, until_so

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@asynccontextmanager
async def begun(url):
    """Yield a client, a store and a session in it, with nothing else there."""
    async with aclosing(connect(url)) as redis:
        await redis.flushall()
        store, session = RedisStore(redis, ttl_s=60), make_session()
        await store.create(session, b"")
        yield redis, store, session


def fail_over(replica, name):
    """Make a replica the primary, to which the name leads from now on."""
    with sync_redis.Redis.from_url(replica.url) as client:
        client.replicaof("NO", "ONE")
    name.target = port_of(replica.url)


async def test_commits_continue_at_the_new_primary_of_the_host_name():
    with replicated() as (old, new):
        async with redis_name(old) as (name, url), begun(url) as (redis, store, session):
            await commit(store, session, [1])
            # Several connections are open at once, all of them to the server that is about to be demoted.
            await asyncio.gather(*(answer(redis.set(f"k{i}", i)) for i in range(20)))
            assert int(await redis.wait(1, 10_000)) == 1
            fail_over(new, name)
            follow(old, new)  # it keeps the connections of its clients
            await commit(store, session, [2])
            await asyncio.gather(*(answer(redis.set(f"k{i}", -i)) for i in range(20)))
            assert (await store.read("s")).token_ids == (1, 2)
            with sync_redis.Redis.from_url(new.url) as primary:
                assert [primary.get(f"k{i}") for i in range(20)] == [str(-i).encode() for i in range(20)]
            with sync_redis.Redis.from_url(old.url) as replica:  # all left, those that only read included
                (left,) = [client for client in replica.client_list() if client["flags"] == "N"]
                assert left["id"] == str(replica.client_id())


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_commits_continue_after_idle_connections_were_reset(redis_server, run):
    """Ray Serve runs orchestrators on uvloop, which raises its own errors for closed connections."""

    async def commit_after_reset():
        async with redis_name(redis_server) as (name, url), begun(url) as (redis, store, session):
            for token_id in (1, 2):
                await asyncio.gather(*(answer(redis.set(f"k{i}", i)) for i in range(4)))
                assert name.reset() > 1
                await asyncio.sleep(0.05)
                await commit(store, session, [token_id])
            await asyncio.gather(*(answer(redis.get(f"k{i}")) for i in range(4)))
            assert (await store.read("s")).token_ids == (1, 2)

    run(commit_after_reset())


async def test_commit_under_way_waits_for_the_new_primary():
    with replicated() as (old, new):
        async with redis_name(old) as (name, url), begun(url) as (redis, store, session):
            assert int(await redis.wait(1, 10_000)) == 1
            with sync_redis.Redis.from_url(old.url) as client:
                client.config_set("min-replicas-to-write", 3)  # it refuses writes, as one that is cut off
            committing = asyncio.create_task(commit(store, session, [1]))
            await asyncio.sleep(0.5)
            assert not committing.done()
            fail_over(new, name)
            await committing
            assert (await store.read("s")).token_ids == (1,)


@contextmanager
def sentinel_of(primary, *lines):
    secret = urlsplit(primary.url).password
    watch = [
        f"sentinel monitor lossless 127.0.0.1 {port_of(primary.url)} 1",
        f"sentinel auth-pass lossless {secret}",
        "sentinel down-after-milliseconds lossless 500",
        "sentinel failover-timeout lossless 3000",
        *lines,
    ]
    with configured_redis(*watch, mode="--sentinel", password="hush" if lines else "") as port:
        query = "?sentinel_password=hush" if lines else ""
        yield f"redis+sentinel://:{secret}@127.0.0.1:1,127.0.0.1:{port}/lossless/0{query}"


async def test_client_follows_sentinel_to_the_promoted_primary():
    """A primary that is killed, its replica, a sentinel with a password and one that does not answer."""
    with replicated() as (old, new), sentinel_of(old, "requirepass hush") as url:
        await asyncio.to_thread(check_redis, url)
        async with begun(url) as (redis, store, session):
            await commit(store, session, [1])
            assert address_of(redis) == f"127.0.0.1:{port_of(old.url)}"
            await asyncio.sleep(1.5)  # Sentinel asks the primary for its replicas once in a while
            assert int(await redis.wait(1, 10_000)) == 1

            os.kill(old.pid, signal.SIGKILL)
            last = await store_until_it_works(store, session, [2])
            assert (await store.read("s")).token_ids == (1, 2)
            assert address_of(redis) == f"127.0.0.1:{port_of(new.url)}"
            assert last is None or isinstance(last, UnavailableError)


async def store_until_it_works(store, session, token_ids):
    """Commit; return the error that it met before it worked, if any."""
    kept, last = session.commit(token_ids), None
    for _ in range(20):
        try:
            await store.append(session, token_ids[:kept], [TokenOrigin.BONUS] * kept)
            return last
        except GammarayError as error:
            last = error
    raise AssertionError(last)


async def test_sentinel_that_demotes_a_living_primary_is_followed():
    """With `min-replicas-to-write`, the old primary refuses writes from its replica's promotion on."""
    with replicated() as (old, new), sentinel_of(old) as url:
        async with aclosing(connect(url)) as redis:
            await answer(redis.set("k", 1))
            with sync_redis.Redis.from_url(old.url) as client:
                client.config_set("min-replicas-to-write", 1)
            sentinel_port = int(url.rpartition(":")[2].split("/")[0])
            with sync_redis.Redis(port=sentinel_port) as sentinel:
                wait_until(lambda: sentinel.sentinel_master("lossless")["num-slaves"] == 1)
                # Once it knows enough.
                wait_until(lambda: sentinel.execute_command("SENTINEL FAILOVER lossless"))
                wait_until(lambda: sentinel.sentinel_master("lossless")["port"] == port_of(new.url))
            await answer(redis.set("k", 2))
            assert address_of(redis) == f"127.0.0.1:{port_of(new.url)}"
            assert await redis.get("k") == b"2"


async def test_worker_announces_itself_despite_an_unresponsive_sentinel():
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    with replicated() as (primary, _), sentinel_of(primary) as url:
        registry_url = url.replace("127.0.0.1:1,", f"127.0.0.1:{port},")
        announcer = Announcer(registry_url, "target", "127.0.0.1:1")
        await announcer.start()
        with sync_redis.Redis.from_url(primary.url) as redis:
            await asyncio.to_thread(wait_until, lambda: redis.exists(announcer.key))
        await announcer.withdraw()
    silent.close()


async def test_loss_of_all_sentinels_is_reported():
    redis = redis_connection.connect(
        "redis+sentinel://127.0.0.1:1,127.0.0.1:2/svc", timeout_s=1, num_retries=0
    )
    assert address_of(redis) == "sentinel svc"
    with pytest.raises(UnavailableError, match="svc"):
        await answer(redis.ping())
    await redis.aclose()


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://127.0.0.1:26379",
        "redis+sentinel:///service/0",
        "redis://:secret@127.0.0.1/0?no_such_option=1",
        "redis+sentinel://:secret@127.0.0.1/service?no_such_option=1",
        "redis+sentinel://127.0.0.1:26379/service/zero",
        "redis+sentinel://127.0.0.1:port/service",
        "redis+sentinel://:secret@a,/service",
        "sentinel://:secret@127.0.0.1/service?sentinel_password=secret",
        "redis://:secret@127.0.0.1:port/0",
        "http://user:secret@127.0.0.1:1/0",
        "foo",
    ],
)
def test_malformed_url_is_rejected_without_its_password(url):
    for use in (connect, check_redis):
        with pytest.raises(
            InvalidArgumentError, match=r"redis_url: got .*allowed: .*redis\+sentinel://"
        ) as caught:
            use(url)
        assert "secret" not in str(caught.value)


def test_sentinel_url_options_apply_to_sentinels_or_servers():
    url = "rediss+sentinel://me:p%40ss@one,two:7/my%20svc/3?ssl_ca_certs=ca.pem&sentinel_username=s&sentinel_password=x"
    pool = connect(url).connection_pool
    kept = pool.connection_kwargs
    assert (kept["username"], kept["password"], kept["db"]) == ("me", "p@ss", 3)
    assert kept["ssl_ca_certs"] == "ca.pem"
    assert "sentinel_password" not in kept
    assert pool.service_name == "my svc"
    sentinels = [s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels]
    assert [(s["host"], s["port"]) for s in sentinels] == [("one", 26379), ("two", 7)]
    assert all((s["username"], s["password"], s["ssl_ca_certs"]) == ("s", "x", "ca.pem") for s in sentinels)


BUSY = "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."
TEMPORARY = (
    BUSY,
    "READONLY You can't write against a read only replica.",
    "LOADING Redis is loading the dataset in memory",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "CLUSTERDOWN The cluster is down",
    "TRYAGAIN Multiple keys request during rehashing of slot",
)
NOPERM = "NOPERM this user has no permissions to run the command"
OOM = "OOM command not allowed when used memory > 'maxmemory'."
MISCONF = "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk."
OF_EACH_KIND = (BUSY, NOPERM, OOM, "NOAUTH Authentication required.", "SOMETHING unknown")
WRITE = "return redis.call('SET', KEYS[1], ARGV[1])"


def refused(name: RedisName) -> set[str]:
    """Return which kinds of commands were refused."""
    return {":".join(command.split(":")[:2]) for command in name.refused}


@pytest.mark.parametrize("reply", OF_EACH_KIND, ids=lambda reply: reply.split()[0])
async def test_error_replies_do_not_end_background_tasks(redis_server, redis, empty, reply):
    """Fleet, presence and a worker's announcer continue after a reply without a restart."""
    async with (
        scripted("target") as worker,
        redis_name(redis_server) as (name, url),
        aclosing(connect(url)) as refusing,
    ):
        state = ProcessStatus("orchestrator", 1, "", "demo", True, 0)
        fleet = Fleet(RedisRegistry(refusing).workers, 50)
        presence, other = (Presence(RedisRegistry(one), lambda: state) for one in (refusing, redis))
        announcer = Announcer(url, "draft", "h:1")

        async def drafts() -> set[str]:
            return (await RedisRegistry(redis).workers())["draft"]

        await fleet.start(0.0)
        await presence.start()
        await announcer.start()
        name.reply = reply
        await until(lambda: {"SCAN 0", "SET gammaray:orchestrator", "SET gammaray:worker"} <= refused(name))
        await redis.flushall()
        announced = {"role": "target", "address": worker.address}
        await redis.set("gammaray:worker:target:t", json.dumps(announced))
        name.reply = ""
        await until(lambda: fleet.targets.pick() is not None)
        assert await until_so(other.others) == [state]
        assert await until_so(drafts) == {"h:1"}
        await announcer.withdraw()
        assert await drafts() == set()
        await presence.stop()
        await fleet.close()


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        pytest.param(OOM, ResourceExhaustedError, "out of memory.*maxmemory", id="OOM"),
        pytest.param(NOPERM, UnavailableError, "refuses commands: NOPERM", id="NOPERM"),
        pytest.param(MISCONF, UnavailableError, "refuses commands: MISCONF", id="MISCONF"),
        pytest.param("ERR wrong number of arguments", InternalError, "wrong number", id="ERR"),
    ],
)
async def test_permanent_error_reply_fails_immediately_with_a_type(redis_server, reply, error, words):
    async with redis_name(redis_server) as (name, url), aclosing(connect(url)) as redis:
        script = BatchedScript(redis, WRITE)
        name.reply = reply
        for call in (redis.set("k", 1), redis.get("k"), script.call(["k"], ["1"])):
            name.refused.clear()
            with pytest.raises(error, match=words):
                await answer(call)
            assert len(name.refused) <= 3, "it is not retried"


@pytest.mark.parametrize("reply", TEMPORARY, ids=lambda reply: reply.split()[0])
async def test_temporary_error_reply_is_retried(redis_server, reply):
    async with redis_name(redis_server) as (name, url), aclosing(connect(url)) as redis:
        script = BatchedScript(redis, WRITE)
        name.reply = reply
        calls = [redis.set("a", 1), redis.register_script(WRITE)(["b"], ["2"]), script.call(["c"], ["3"])]
        tasks = [asyncio.create_task(answer(call)) for call in calls]
        await until(lambda: len(name.refused) >= 6)
        name.reply = ""
        await asyncio.gather(*tasks)
        assert await redis.mget("a", "b", "c") == [b"1", b"2", b"3"]


async def test_call_without_a_free_connection_fails_after_one_timeout(redis_server):
    redis = redis_connection.connect(redis_server.url, timeout_s=0.5, num_retries=20, max_connections=1)
    only = await redis.connection_pool.get_connection()
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="No connection available"):
        await answer(redis.ping())
    assert time.monotonic() - began < 5, "it is not repeated twenty times"
    await redis.connection_pool.release(only)
    assert await answer(redis.ping())
    await redis.aclose()


async def test_start_gives_up_in_time_with_a_typed_error():
    with pytest.raises(UnavailableError, match=r"redis://127.0.0.1:1/0 does not respond \(tried for 1 s\)"):
        await wait_for_redis("redis://127.0.0.1:1/0", 1.0)


@pytest.mark.parametrize("version", ["5.0.7", "6.0.16", "6.1.9"])
async def test_start_refuses_a_redis_that_is_too_old(redis_server, version):
    async with redis_name(redis_server) as (name, url):
        name.version = version
        told = rf"redis_url: got redis://\.\.\.@127\.0\.0\.1:{name.port}/0, Redis {version}, "
        told += "allowed: Redis 6.2 or newer, or Valkey 7.2 or newer"
        announcer = Announcer(url, "target", "h:1")
        for start in (wait_for_redis(url, 60.0), announcer.start()):
            with pytest.raises(InvalidArgumentError, match=f"^{told}$"):
                await start
        await announcer.withdraw()


@pytest.mark.parametrize("version", ["6.2.0", "7.2.4", "8.4.0", "10.0.0", "255.255.255", "unknown", ""])
async def test_start_accepts_newer_and_unknown_versions(redis_server, version):
    async with redis_name(redis_server) as (name, url):
        name.version = version
        await wait_for_redis(url, 60.0)


@pytest.mark.parametrize("error", [RecursionError("too deep"), NotImplementedError(), RuntimeError("other")])
async def test_errors_of_our_own_code_are_neither_renamed_nor_retried(redis, error):
    calls = []

    async def fail():
        calls.append(1)
        raise error

    with pytest.raises(type(error)) as raised:
        await redis.repeated(fail)
    assert raised.value is error
    assert len(calls) == 1


async def test_start_does_not_wait_for_a_password_to_become_right(redis_server):
    wrong = redis_server.url.replace("redis://:", "redis://:not-")
    with pytest.raises(UnavailableError, match="password"):
        await wait_for_redis(wrong, 600.0)


def test_node_of_a_redis_cluster_is_refused_with_the_reason():
    with configured_redis("cluster-enabled yes") as port:
        with pytest.raises(InvalidArgumentError, match=r"redis_url: got .*Redis Cluster, allowed: .*without"):
            check_redis(f"redis://127.0.0.1:{port}/0")


def push(client, value):
    try:
        return client.execute_command("RPUSH", "tokens", value) > 0
    except sync_redis.ConnectionError:
        return False


def kill(server):
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.is_running)


def test_redis_killed_while_writing_keeps_all_acknowledged_writes():
    with running_redis() as server:
        url, first, answered = server.url, server.pid, 0
        client = sync_redis.Redis.from_url(url)
        killer = threading.Thread(target=kill, args=[server])
        while push(client, answered):
            answered += 1
            if answered == 100:
                killer.start()
        killer.join()
        assert not server.is_running
        server.revive()
        assert server.is_running
        assert (server.url, server.pid != first) == (url, True)
        there = sync_redis.Redis.from_url(url).lrange("tokens", 0, -1)
        # One more may be there: its answer was lost.
        assert [int(value) for value in there] in (list(range(answered)), list(range(answered + 1)))
        assert answered >= 100


def test_restarted_redis_keeps_its_memory_limit(tmp_path):
    with redis_server.RedisServer.start(tmp_path, 300 * 2**20) as server:
        for _ in range(2):
            client = sync_redis.Redis.from_url(server.url)
            assert client.config_get("maxmemory") == {"maxmemory": str(300 * 2**20)}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            client.close()
            kill(server)
            server.revive()
    assert 2**28 <= redis_server.default_maxmemory() <= 2**32


def test_redis_that_ends_repeatedly_is_not_restarted(monkeypatch):
    monkeypatch.setattr(redis_server, "MAX_REVIVALS", 2)
    monkeypatch.setattr(redis_server, "REVIVALS_PER_S", 60.0)  # of which this takes less on any machine
    with running_redis() as server:
        for _ in range(2):
            kill(server)
            server.revive()
        kill(server)
        with pytest.raises(UnavailableError, match="2 times within"):
            server.revive()


def test_missing_redis_is_reported_quickly_without_the_password():
    with socket.socket() as taken:  # and not listening
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(UnavailableError, match=str(port)) as caught:
            check_redis(f"redis://:secret@127.0.0.1:{port}/0")
    assert time.monotonic() - began < CHECK_TIMEOUT_S, "it is refused, and not waited for"
    assert "secret" not in str(caught.value)


def test_private_redis_requires_its_password_and_keeps_it_out_of_arguments_and_files():
    with running_redis() as server:
        check_redis(server.url)
        port, password = urlsplit(server.url).port, urlsplit(server.url).password
        for stranger in (f"redis://127.0.0.1:{port}/0", f"redis://:guess@127.0.0.1:{port}/0"):
            with pytest.raises(UnavailableError):
                check_redis(stranger)
        assert password
        process = psutil.Process(server.pid)
        assert password not in " ".join(process.cmdline())
        files = [path for path in Path(process.cwd()).rglob("*") if path.is_file()]
        assert not any(password.encode() in path.read_bytes() for path in files)
