"""The Redis of a chaos run: restarted when it dies, with injected error replies and pauses."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

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


class ChaosRedis:
    """Injects failures into Redis; each method returns once the server has recovered or was killed."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server

    def demote(self, seconds: float) -> None:
        """Make it a replica of a server that does not exist: it replies to writes with READONLY."""
        self._during(
            seconds,
            lambda client: client.replicaof("127.0.0.1", "1"),
            lambda client: client.replicaof("NO", "ONE"),
        )

    def fill(self, seconds: float) -> None:
        """Set its memory limit to 1 byte: it replies to writes with OOM."""
        self._wait_until_ready()
        with self._client() as client:
            before = client.config_get("maxmemory")["maxmemory"]
            policy = client.config_get("maxmemory-policy")["maxmemory-policy"]
            client.config_set("maxmemory-policy", "noeviction")

        def restore(client: redis.Redis) -> None:
            client.config_set("maxmemory", before)
            client.config_set("maxmemory-policy", policy)

        self._during(seconds, lambda client: client.config_set("maxmemory", 1), restore)

    def occupy(self, seconds: float) -> None:
        """Run an endless script: it replies to all commands with BUSY."""
        self._wait_until_ready()
        with self._client() as client:
            client.config_set("lua-time-limit", 50)
        endless = threading.Thread(target=self._run_endless, daemon=True)
        endless.start()
        time.sleep(seconds)
        self._until_done(lambda client: client.script_kill())
        endless.join(CALL_TIMEOUT_S)

    def kill_full(self) -> None:
        """Make its file slow to load and kill it: after the restart it replies with LOADING for a while."""
        self._wait_until_ready()
        with self._client() as client:
            for _ in range(JUNK_CALLS):
                client.eval(_JUNK, 0, str(JUNK_WRITES))
        os.kill(self.server.pid, signal.SIGKILL)

    def _run_endless(self) -> None:
        with contextlib.suppress(redis.RedisError), self._client(timeout_s=None) as client:
            client.eval("while true do end", 0)

    def _wait_until_ready(self) -> None:
        """Wait until the previous failure is over: the server may still be loading its file."""
        self._until_done(lambda client: client.ping())

    def _during(
        self, seconds: float, begin: Callable[[redis.Redis], object], end: Callable[[redis.Redis], object]
    ) -> None:
        self._wait_until_ready()
        with self._client() as client:
            begin(client)
        time.sleep(seconds)
        self._until_done(end)

    def _until_done(self, work: Callable[[redis.Redis], object]) -> None:
        """Retry while the server is stopped or down; NOTBUSY means that it was restarted."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                with self._client() as client:
                    work(client)
                return
            except redis.ResponseError as error:
                if "NOTBUSY" in str(error):
                    return
            except redis.RedisError:
                pass
            time.sleep(POLL_S)
        raise AssertionError("Redis does not recover from a strike")

    def _client(self, timeout_s: float | None = CALL_TIMEOUT_S) -> redis.Redis:
        return redis.Redis.from_url(
            self.server.url, socket_timeout=timeout_s, decode_responses=True, retry=Retry(NoBackoff(), 0)
        )


@contextmanager
def chaos_redis() -> Iterator[ChaosRedis]:
    """Run a Redis that is restarted when it dies."""
    with TemporaryDirectory() as folder:
        started, ending = threading.Event(), threading.Event()
        found: list[RedisServer] = []

        def keep() -> None:  # a server ends with the thread that started it
            with RedisServer.start(Path(folder)) as server:
                found.append(server)
                started.set()
                while not ending.wait(POLL_S):
                    if not server.is_running:
                        server.revive()

        keeper = threading.Thread(target=keep, daemon=True)
        keeper.start()
        assert started.wait(60), "Redis did not start"
        try:
            yield ChaosRedis(found[0])
        finally:
            ending.set()
            keeper.join(60)
