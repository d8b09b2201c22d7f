"""Error replies of Redis: the errors that callers get, and background tasks that survive them."""

import asyncio
import json
import time
from contextlib import aclosing

import pytest

from gammaray.deploy import redis_connection
from gammaray.errors import InternalError, InvalidArgumentError, ResourceExhaustedError, UnavailableError
from gammaray.types import ProcessStatus
from orchestrator.status import Presence
from orchestrator.storage.client import BatchedScript, answer, check_redis, connect, wait_for_redis
from orchestrator.storage.registry import RedisRegistry
from orchestrator.workers.fleet import Fleet
from services.process.registry import Announcer
from tests.support.workers.redis_helpers import RedisName, configured_redis, redis_name
from tests.support.workers.scripted_workers import scripted, until, until_so

pytestmark = [pytest.mark.integration, pytest.mark.slow]

BUSY = "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."
READONLY = "READONLY You can't write against a read only replica."
LOADING = "LOADING Redis is loading the dataset in memory"
TEMPORARY = (
    BUSY,
    READONLY,
    LOADING,
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "CLUSTERDOWN The cluster is down",
    "TRYAGAIN Multiple keys request during rehashing of slot",
)
NOPERM = "NOPERM this user has no permissions to run the command"
OOM = "OOM command not allowed when used memory > 'maxmemory'."
MISCONF = "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk."
OF_EACH_KIND = (BUSY, NOPERM, OOM, "NOAUTH Authentication required.", "SOMETHING unknown")
WRITE = "return redis.call('SET', KEYS[1], ARGV[1])"


def entry(address: str) -> str:
    return json.dumps({"role": "target", "address": address})


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
        await redis.set("gammaray:worker:target:t", entry(worker.address))
        name.reply = ""
        await until(lambda: fleet.targets.pick() is not None)
        assert await until_so(other.others) == [state]
        assert await until_so(drafts) == {"h:1"}
        await announcer.withdraw()
        await presence.stop()
        await fleet.close()


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        pytest.param(OOM, ResourceExhaustedError, "out of memory.*maxmemory", id="OOM"),
        pytest.param(NOPERM, UnavailableError, "refuses commands: NOPERM", id="NOPERM"),
        pytest.param(MISCONF, UnavailableError, "refuses commands: MISCONF", id="MISCONF"),
        pytest.param("WRONGTYPE Operation against a key", InternalError, "WRONGTYPE", id="WRONGTYPE"),
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


async def test_lasting_error_reply_names_its_code(redis_server):
    async with redis_name(redis_server) as (name, url), aclosing(connect(url)) as redis:
        name.reply = BUSY
        with pytest.raises(UnavailableError, match="refuses commands: BUSY"):
            await answer(redis.set("k", 1))


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
