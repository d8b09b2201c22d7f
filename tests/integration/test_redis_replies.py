"""Error replies of Redis: the errors that callers get, and background tasks that survive them."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from gammaray.deploy import redis_connection
from gammaray.errors import InternalError, InvalidArgumentError, ResourceExhaustedError, UnavailableError
from gammaray.types import ProcessStatus
from orchestrator.status import Presence
from orchestrator.storage.client import (
    BatchedScript,
    answer,
    check_redis,
    connect,
    wait_for_redis,
)
from orchestrator.storage.registry import RedisRegistry
from orchestrator.workers.fleet import Fleet
from services.process.registry import Announcer
from tests.support.workers.redis_helpers import RedisName, configured_redis, redis_name
from tests.support.workers.scripted_workers import scripted, until, until_so

pytestmark = [pytest.mark.integration, pytest.mark.slow]

REPLIES = (
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "NOPERM this user has no permissions to run the command",
    "READONLY You can't write against a read only replica.",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "LOADING Redis is loading the dataset in memory",
    "CLUSTERDOWN The cluster is down",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    "MOVED 3999 127.0.0.1:6381",
    "NOAUTH Authentication required.",
    "ERR unknown command",
    "SOMETHING unknown",
)
WRITE = "return redis.call('SET', KEYS[1], ARGV[1])"


def entry(address: str) -> str:
    return json.dumps({"role": "target", "address": address})


def refused(name: RedisName) -> set[str]:
    """Return which kinds of commands were refused."""
    return {":".join(command.split(":")[:2]) for command in name.refused}


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: reply.split()[0])
async def test_error_replies_do_not_end_background_tasks(redis_server, reply):
    """Fleet, presence and a worker's announcer continue after any reply without a restart."""
    async with scripted("target") as worker, redis_name(redis_server) as (name, url):
        redis, direct = connect(url), connect(redis_server.url)
        await direct.flushall()
        fleet = Fleet(RedisRegistry(redis).workers, 50)
        state = ProcessStatus("orchestrator", 1, "", "demo", True, 0)
        presence, other = (
            Presence(RedisRegistry(redis), lambda: state),
            Presence(RedisRegistry(direct), lambda: state),
        )
        announcer = Announcer(url, "draft", "h:1")

        async def drafts() -> set[str]:
            return (await RedisRegistry(direct).workers())["draft"]

        await fleet.start(0.0)
        await presence.start()
        await announcer.start()
        name.reply = reply
        await until(lambda: {"SCAN 0", "SET gammaray:orchestrator", "SET gammaray:worker"} <= refused(name))
        await direct.flushall()
        await direct.set("gammaray:worker:target:t", entry(worker.address))
        name.reply = ""
        await until(lambda: fleet.targets.pick() is not None)
        assert await until_so(other.others) == [state]
        assert await until_so(drafts) == {"h:1"}
        await announcer.withdraw()
        await presence.stop()
        await fleet.close()
        await redis.aclose()
        await direct.aclose()


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        pytest.param(REPLIES[4], ResourceExhaustedError, "out of memory.*maxmemory", id="OOM"),
        pytest.param(REPLIES[2], UnavailableError, "refuses commands: NOPERM", id="NOPERM"),
        pytest.param(REPLIES[8], UnavailableError, "refuses commands: MISCONF", id="MISCONF"),
        pytest.param("WRONGTYPE Operation against a key", InternalError, "WRONGTYPE", id="WRONGTYPE"),
        pytest.param("ERR wrong number of arguments", InternalError, "wrong number", id="ERR"),
    ],
)
async def test_permanent_error_reply_fails_immediately_with_a_type(redis_server, reply, error, words):
    async with redis_name(redis_server) as (name, url):
        redis = connect(url)
        script = BatchedScript(redis, WRITE)
        name.reply = reply
        for call in (redis.set("k", 1), redis.get("k"), script.call(["k"], ["1"])):
            name.refused.clear()
            with pytest.raises(error, match=words):
                await answer(call)
            assert len(name.refused) <= 3, "it is not retried"
        await redis.aclose()


@pytest.mark.parametrize(
    "reply", [REPLIES[i] for i in (0, 1, 3, 5, 6, 7)], ids=lambda reply: reply.split()[0]
)
async def test_temporary_error_reply_is_retried(redis_server, reply):
    async with redis_name(redis_server) as (name, url):
        redis = connect(url)
        script = BatchedScript(redis, WRITE)
        name.reply = reply
        calls = [redis.set("a", 1), redis.register_script(WRITE)(["b"], ["2"]), script.call(["c"], ["3"])]
        tasks = [asyncio.create_task(answer(call)) for call in calls]
        await until(lambda: len(name.refused) >= 6)
        name.reply = ""
        await asyncio.gather(*tasks)
        assert await redis.mget("a", "b", "c") == [b"1", b"2", b"3"]
        await redis.aclose()


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
    async with redis_name(redis_server) as (name, url):
        redis = connect(url)
        name.reply = REPLIES[0]
        with pytest.raises(UnavailableError, match="refuses commands: BUSY"):
            await answer(redis.set("k", 1))
        await redis.aclose()


async def test_start_waits_for_redis_and_logs_it(redis_server, caplog):
    async with redis_name(redis_server) as (name, url):
        name.reply = REPLIES[5]
        waiting = asyncio.create_task(wait_for_redis(url, 60.0))
        await until(lambda: "waiting up to 60 s" in caplog.text)
        await until(lambda: len(name.refused) >= 3)
        assert not waiting.done()
        name.reply = ""
        await waiting
    assert "responded after" in caplog.text
    password = url.split("@")[0].rpartition(":")[2]
    assert password
    assert password not in caplog.text


async def test_start_gives_up_in_time_with_a_typed_error():
    with pytest.raises(UnavailableError, match=r"redis://127.0.0.1:1/0 does not respond \(tried for 1 s\)"):
        await wait_for_redis("redis://127.0.0.1:1/0", 1.0)


async def test_start_does_not_wait_for_a_password_to_become_right(redis_server):
    wrong = redis_server.url.replace("redis://:", "redis://:not-")
    with pytest.raises(UnavailableError, match="password"):
        await wait_for_redis(wrong, 600.0)


def test_node_of_a_redis_cluster_is_refused_with_the_reason():
    with configured_redis("cluster-enabled yes") as port:
        with pytest.raises(InvalidArgumentError, match=r"redis_url: got .*Redis Cluster, allowed: .*without"):
            check_redis(f"redis://127.0.0.1:{port}/0")
