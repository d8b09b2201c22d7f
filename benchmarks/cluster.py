"""A cluster on loopback for the length of a block: `gammaray up` as a user would start it."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

from gammaray import AsyncClient
from gammaray.errors import GammarayError

_HOST = "127.0.0.1"
START_TIMEOUT_S = 180.0
_WORKERS_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 45.0
GONE_TIMEOUT_S = 10.0  # for the processes below `gammaray up`, once it has ended
_POLL_S = 0.05
_GAMMARAY = "from gammaray.cli import main; main()"  # the console script, wherever it is installed
_READY = re.compile(r"ready http=(\S+) grpc=(\S+)")

Result = TypeVar("Result")


class ClusterError(RuntimeError):
    """The cluster did not start, or did not end all of its processes."""


@dataclass(frozen=True)
class Cluster:
    """Where a running cluster is reached."""

    http_address: str
    grpc_address: str
    pid: int


def run_or_exit(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` and return its result; what commonly fails ends the program with a message and code 1."""

    async def stopped_by_sigterm() -> Result:
        task = asyncio.current_task()
        assert task is not None
        # As SIGINT does; otherwise the cluster, in a session of its own, would outlive this process.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(stopped_by_sigterm())
    except (ClusterError, GammarayError) as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except asyncio.CancelledError:
        sys.exit(143)


@asynccontextmanager
async def connected(*options: str, source: Path | None = None) -> AsyncIterator[AsyncClient]:
    """Run a cluster as `running_cluster` does, and yield a client once draft and target workers are there.

    Raises:
        ClusterError: As `running_cluster`.
        DeadlineExceededError: A worker did not come up within a minute.
    """
    async with (
        running_cluster(*options, source=source) as cluster,
        AsyncClient(cluster.grpc_address) as client,
    ):
        await client.wait_ready(_WORKERS_TIMEOUT_S, roles=("target", "draft"))
        yield client


@asynccontextmanager
async def running_cluster(
    *options: str, source: Path | None = None, timeout_s: float = START_TIMEOUT_S
) -> AsyncIterator[Cluster]:
    """Run `gammaray up` on free loopback ports with further `options` until the block ends.

    Args:
        *options: Options of `gammaray up`.
        source: Source tree whose code runs, with the packages of this environment; None: the installed one.
        timeout_s: Longest wait for its workers, three minutes unless their models take longer to load.

    Raises:
        ClusterError: It did not become ready in time, or processes outlived it (they are
            killed then).
    """
    http_port, grpc_port = free_ports(2)
    own = ["--http-port", str(http_port), "--grpc-port", str(grpc_port), "--start-timeout-s", str(timeout_s)]
    with tempfile.TemporaryFile("w+") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _GAMMARAY, "up", "--wait-ready", *own, *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=source,
            env=None if source is None else {**os.environ, "PYTHONPATH": str(source)},
            # Ctrl-C of a terminal reaches this process alone, which then stops the cluster in order.
            start_new_session=True,
        )
        try:
            cluster = await _wait_ready(process, errors, timeout_s + _STOP_TIMEOUT_S)
            drain = asyncio.create_task(_drain(process))
            try:
                yield cluster
            finally:
                drain.cancel()
        finally:
            await stop(process)


async def _wait_ready(process: asyncio.subprocess.Process, errors: IO[str], timeout_s: float) -> Cluster:
    try:
        found = await asyncio.wait_for(_ready_line(process), timeout_s)
    except asyncio.TimeoutError:
        raise ClusterError(f"not ready within {timeout_s:.0f} s\n{_tail(errors)}") from None
    if found is None:
        await _has_ended(process, _STOP_TIMEOUT_S)
        raise ClusterError(f"`gammaray up` ended with code {process.returncode}\n{_tail(errors)}")
    http, grpc = (address.removeprefix("http://").rstrip("/") for address in found.groups())
    return Cluster(http, grpc, process.pid)


async def _ready_line(process: asyncio.subprocess.Process) -> re.Match[str] | None:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if found := _READY.search(line.decode()):
            return found
    return None


async def _drain(process: asyncio.subprocess.Process) -> None:
    """Read the output, since the cluster would block at a full pipe."""
    assert process.stdout is not None
    while await process.stdout.read(2**16):
        pass


async def stop(process: asyncio.subprocess.Process) -> None:
    """Stop `gammaray up` and wait until all of its processes have ended.

    Raises:
        ClusterError: Some outlived it; they were killed.
    """
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
    if not await _has_ended(process, _STOP_TIMEOUT_S):
        process.kill()
        await _has_ended(process, _STOP_TIMEOUT_S)
    left = await _outliving(family)
    if left:
        names = [f"{p.pid} {p.name()}" for p in left if p.is_running()]
        for p in left:
            _kill(p)
        raise ClusterError(f"not ended by `gammaray up`, now killed: {', '.join(names)}")


async def _has_ended(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    """Wait for the end of the process itself; `process.wait()` would wait for all who hold its stdout."""
    for _ in range(int(timeout_s / _POLL_S)):
        if process.returncode is not None:
            return True
        await asyncio.sleep(_POLL_S)
    return False


async def _outliving(family: Sequence[psutil.Process]) -> list[psutil.Process]:
    def wait() -> list[psutil.Process]:
        return [p for p in psutil.wait_procs(family, timeout=GONE_TIMEOUT_S)[1] if is_alive(p)]

    return await asyncio.to_thread(wait)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass


def free_ports(count: int) -> list[int]:
    """Return unused loopback ports, below those that the system and Ray assign."""
    found: list[int] = []
    while len(found) < count:
        port = random.randint(10_000, 29_000)
        with socket.socket() as s:
            if port not in found and s.connect_ex((_HOST, port)) != 0:
                found.append(port)
    return found


def _tail(errors: IO[str], num_lines: int = 30) -> str:
    errors.seek(0)
    return "".join(errors.readlines()[-num_lines:])
