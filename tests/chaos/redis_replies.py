"""Error replies of the Redis of a chaos run, under load."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from orchestrator.launcher.redis_server import RedisServer

POLL_S = 0.05
CALL_TIMEOUT_S = 10.0
JUNK_CALLS, JUNK_WRITES = 10, 40_000
"""Scripts, and writes in each, that make the append-only file take a second or more to load."""

_JUNK = """
redis.replicate_commands()
for i = 1, tonumber(ARGV[1]) do redis.call('SET', 'chaos:junk', i) end
"""


def _occupy(client: redis.Redis) -> None:
    """Run an endless script."""
    client.config_set("lua-time-limit", 50)
    client.connection_pool.get_connection().send_command("EVAL", "while true do end", 0)


def _kill_full(client: redis.Redis) -> None:
    """Make the file slow to load, and kill the server."""
    for _ in range(JUNK_CALLS):
        client.eval(_JUNK, 0, str(JUNK_WRITES))
    os.kill(client.info("server")["process_id"], signal.SIGKILL)


REPLIES: dict[str, tuple[Callable[[redis.Redis], object], Callable[[redis.Redis], object]]] = {
    "READONLY": (
        lambda client: client.replicaof("127.0.0.1", "1"),
        lambda client: client.replicaof("NO", "ONE"),
    ),
    "OOM": (
        lambda client: client.config_set("maxmemory", 1),
        lambda client: client.config_set("maxmemory", 0),
    ),
    "BUSY": (_occupy, lambda client: client.script_kill()),
    "LOADING": (_kill_full, lambda client: client.ping()),
}
"""What makes a server reply so, and what ends it: LOADING comes after a restart, and ends by itself."""


@contextmanager
def replying(server: RedisServer, code: str) -> Iterator[None]:
    """Have a server, which is restarted when it dies, give an error reply within the context."""
    begin, end = REPLIES[code]
    _until_done(server, begin)
    try:
        yield
    finally:
        _until_done(server, end)


def _until_done(server: RedisServer, work: Callable[[redis.Redis], object]) -> None:
    """Retry while the server is stopped, down or loading; NOTBUSY means that it was restarted."""
    deadline, retry = time.monotonic() + 60, Retry(NoBackoff(), 0)
    while time.monotonic() < deadline:
        try:
            with redis.Redis.from_url(server.url, socket_timeout=CALL_TIMEOUT_S, retry=retry) as client:
                work(client)
            return
        except redis.ResponseError as error:
            if "NOTBUSY" in str(error):
                return
        except redis.RedisError:
            pass
        time.sleep(POLL_S)
    raise AssertionError("Redis does not recover from a strike")
