"""Servers on loopback for the length of a block: `gammaray up` as a user would start it, and others."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx
import psutil

from gammaray import AsyncClient
from gammaray.demo_pair import DEMO_PAIR
from gammaray.errors import GammarayError
from orchestrator.launcher.preflight import free_ports
from orchestrator.launcher.reaper import runs

START_TIMEOUT_S = 180.0
_WORKERS_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 45.0
GONE_TIMEOUT_S = 10.0  # for the processes below `gammaray up`, once it has ended
_POLL_S = 0.05
_GAMMARAY = "from gammaray.cli import main; main()"  # the console script, wherever it is installed
_READY = re.compile(r"ready http=(\S+) grpc=(\S+)\n")

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


async def at_once(total: int, limit: int, work: Callable[[int], Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results of 0 to total - 1, at most `limit` at a time."""
    free = asyncio.Semaphore(limit)

    async def one(number: int) -> Result:
        async with free:
            return await work(number)

    return await asyncio.gather(*map(one, range(total)))


@asynccontextmanager
async def connected(
    target: str = DEMO_PAIR,
    draft: str | None = DEMO_PAIR,
    head: str | None = None,
    weights: str = "auto",
    source: Path | None = None,
    dtype: str = "auto",
) -> AsyncIterator[AsyncClient]:
    """Run `gammaray up` until the block ends, without draft workers if `draft` is None; yield its client.

    Args:
        target: Directory or hub name, or "demo".
        draft: Likewise.
        head: A head in the target worker.
        weights: Of the draft or head: auto or int8.
        source: As of `running_cluster`.
        dtype: Of the workers' arithmetic.

    Raises:
        ClusterError: It did not start, or did not end all of its processes.
        DeadlineExceededError: A worker did not come up within two minutes.
    """
    drafts = ("--draft", draft) if draft else ("--draft-workers", "0")
    pair = ("--dtype", dtype, "--draft-weights", weights, *drafts)
    if head:
        pair = (*pair, "--head", head)
    roles = ("target", "draft") if draft else ("target",)
    async with (
        running_cluster("--target", target, *pair, source=source) as cluster,
        AsyncClient(cluster.grpc_address) as client,
    ):
        await client.wait_ready(_WORKERS_TIMEOUT_S, roles=roles)
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
    http_port, grpc_port = free_ports("127.0.0.1", 2)
    own = ["--http-port", str(http_port), "--grpc-port", str(grpc_port), "--start-timeout-s", str(timeout_s)]
    with tempfile.TemporaryFile(
        "a+"
    ) as output:  # append: writes go to the end, also while this process reads
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _GAMMARAY, "up", "--wait-ready", *own, *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=source,
            env=None if source is None else {**os.environ, "PYTHONPATH": str(source)},
            # Ctrl-C of a terminal reaches this process alone, which then stops the cluster in order.
            start_new_session=True,
        )
        async with _stopped(process):
            yield await _wait_ready(process, output, timeout_s + _STOP_TIMEOUT_S)


@asynccontextmanager
async def running_server(command: Sequence[str], timeout_s: float) -> AsyncIterator[str]:
    """Run another program's HTTP server on a free loopback port until the block ends; yield its URL.

    Args:
        command: Takes `--host` and `--port`; `GET /health` answers with 200 once it is ready.
        timeout_s: Longest wait for that.

    Raises:
        ClusterError: It does not run, ended, or was not ready in time.
    """
    (port,) = free_ports("127.0.0.1", 1)
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryFile("w+") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *(*command, "--host", "127.0.0.1", "--port", str(port)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the server.
            )
        except OSError as error:
            raise ClusterError(f"{command[0]}: {error}") from None
        url = f"http://127.0.0.1:{port}"
        async with _stopped(process):
            async with httpx.AsyncClient(timeout=2.0) as client:
                while not await _is_healthy(client, url):
                    if process.returncode is not None:
                        ended = f"{command[0]} ended with code {process.returncode}"
                        raise ClusterError(f"{ended}\n{_tail(output)}")
                    if time.monotonic() > deadline:
                        raise ClusterError(
                            f"{command[0]}: not ready within {timeout_s:.0f} s\n{_tail(output)}"
                        )
                    await asyncio.sleep(_POLL_S)
            yield url


async def _is_healthy(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


async def _wait_ready(process: asyncio.subprocess.Process, output: IO[str], timeout_s: float) -> Cluster:
    deadline = time.monotonic() + timeout_s
    while True:
        output.seek(0)
        if found := _READY.search(output.read()):
            http, grpc = (address.removeprefix("http://").rstrip("/") for address in found.groups())
            return Cluster(http, grpc, process.pid)
        if process.returncode is not None:
            raise ClusterError(f"`gammaray up` ended with code {process.returncode}\n{_tail(output)}")
        if time.monotonic() > deadline:
            raise ClusterError(f"not ready within {timeout_s:.0f} s\n{_tail(output)}")
        await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def _stopped(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """Stop a server at the end of the block; an error of that does not replace what ended the block early."""
    try:
        yield
    except BaseException:
        with suppress(ClusterError):
            await stop(process)
        raise
    await stop(process)


async def stop(process: asyncio.subprocess.Process) -> None:
    """Stop a server and wait until all of its processes have ended.

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
    left = [p for p in await asyncio.to_thread(_outliving, family) if runs(p)]
    for process_left in left:
        with suppress(psutil.NoSuchProcess):
            process_left.kill()
    if left:
        names = ", ".join(f"{p.pid}" for p in left)
        raise ClusterError(f"not ended with it, now killed: {names}")


async def _has_ended(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    """Wait for the end of the process itself; `process.wait()` would wait for all who hold its stdout."""
    for _ in range(int(timeout_s / _POLL_S)):
        if process.returncode is not None:
            return True
        await asyncio.sleep(_POLL_S)
    return False


def _outliving(family: Sequence[psutil.Process]) -> list[psutil.Process]:
    return list(psutil.wait_procs(family, timeout=GONE_TIMEOUT_S)[1])


def _tail(output: IO[str], num_lines: int = 30) -> str:
    output.seek(0)
    return "".join(output.readlines()[-num_lines:])
