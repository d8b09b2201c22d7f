"""Failovers: another server becomes the primary, by name or by Sentinel, and commits continue there."""

import asyncio
import contextlib
import os
import signal
from urllib.parse import urlsplit

import pytest
import redis as sync_redis
import uvloop

from gammaray.deploy import redis_connection
from gammaray.deploy.redis_connection import address_of
from gammaray.errors import GammarayError, InvalidArgumentError, UnavailableError
from gammaray.types import TokenOrigin
from orchestrator.storage.client import answer, check_redis, connect
from orchestrator.storage.registry import RedisRegistry
from orchestrator.storage.session_store import RedisStore
from services.process.registry import Announcer
from tests.support.workers.redis_helpers import (
    configured_redis,
    follow,
    port_of,
    redis_name,
    replicated,
    wait_until,
)
from tests.support.workers.scripted_workers import make_session, until_so

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@contextlib.asynccontextmanager
async def begun(url):
    """Yield a client, a store and a session in it, with nothing else there."""
    async with contextlib.aclosing(connect(url)) as redis:
        await redis.flushall()
        store, session = RedisStore(redis, ttl_s=60), make_session()
        await store.create(session, b"")
        yield redis, store, session


async def commit(store, session, token_ids):
    kept = session.commit(token_ids)
    await store.append(session, token_ids[:kept], [TokenOrigin.BONUS] * kept)


def promote(replica):
    with sync_redis.Redis.from_url(replica.url) as client:
        client.replicaof("NO", "ONE")


async def test_commits_continue_at_the_new_primary_of_the_host_name():
    with replicated() as (old, new):
        async with redis_name(old) as (name, url), begun(url) as (redis, store, session):
            await commit(store, session, [1])
            # Several connections are open at once, all of them to the server that is about to be demoted.
            await asyncio.gather(*(answer(redis.set(f"k{i}", i)) for i in range(20)))
            assert int(await redis.wait(1, 10_000)) == 1
            promote(new)
            name.target = port_of(new.url)
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
            promote(new)
            name.target = port_of(new.url)
            await committing
            assert (await store.read("s")).token_ids == (1,)


async def test_worker_announces_itself_at_the_new_primary():
    with replicated() as (old, new):
        async with redis_name(old) as (name, url), contextlib.aclosing(connect(new.url)) as fresh:
            announcer = Announcer(url, "target", "h:1")
            await announcer.start()

            async def targets() -> set[str]:
                return (await RedisRegistry(fresh).workers())["target"]

            promote(new)
            name.target = port_of(new.url)
            follow(old, new)
            await fresh.flushall()
            assert await until_so(targets) == {"h:1"}
            await announcer.withdraw()
            assert await targets() == set()


@contextlib.contextmanager
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
        async with contextlib.aclosing(connect(url)) as redis:
            await answer(redis.set("k", 1))
            with sync_redis.Redis.from_url(old.url) as client:
                client.config_set("min-replicas-to-write", 1)
            sentinel_port = int(url.rpartition(":")[2].split("/")[0])
            with sync_redis.Redis(port=sentinel_port) as sentinel:
                wait_until(lambda: sentinel.sentinel_master("lossless")["num-slaves"] == 1)
                wait_until(
                    lambda: sentinel.execute_command("SENTINEL FAILOVER lossless")
                )  # if it knows enough
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
