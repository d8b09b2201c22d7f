"""A cluster that a command starts on this machine by `gammaray up`, on free loopback ports."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from gammaray.errors import FailedPreconditionError, UnavailableError
from gammaray.program.ports import free_port

START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 45.0
_READY = re.compile(rb"ready http=(\S+) grpc=(\S+)")
_SAID = "gammaray: "


class NotServedError(FailedPreconditionError):
    """The models cannot be served; the message is the launcher's."""


class LocalCluster(NamedTuple):
    """Where a cluster serves: the base URL of the HTTP API, and host:port of the gRPC API."""

    http: str
    grpc: str


@asynccontextmanager
async def local_cluster(*models: str) -> AsyncIterator[LocalCluster]:
    """Start a cluster with the options of `gammaray up` that name its models, and stop it in the end.

    NotServedError if it ended before it was ready, UnavailableError if it was not ready in time.
    """
    ports = [option for name in ("--http-port", "--grpc-port") for option in (name, str(free_port()))]
    with tempfile.TemporaryFile("w+") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gammaray", "up", *models, *ports),
            *("--wait-ready", "--die-with-parent", "--start-timeout-s", str(START_TIMEOUT_S)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C of a terminal reaches this process alone
        )
        try:
            try:
                found = await asyncio.wait_for(_ready(process), START_TIMEOUT_S + _STOP_TIMEOUT_S)
            except asyncio.TimeoutError:
                raise UnavailableError(f"gammaray up did not start within {START_TIMEOUT_S:g} s") from None
            if found is None:
                errors.seek(0)
                raise NotServedError(_reason(errors.read()))
            yield found
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
            except asyncio.TimeoutError:
                process.kill()


async def _ready(process: asyncio.subprocess.Process) -> LocalCluster | None:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if found := _READY.search(line):
            return LocalCluster(found[1].decode(), found[2].decode())
    return None


def _reason(said: str) -> str:
    """Return the last line that the launcher wrote itself, else the end of what was written."""
    lines = [line for line in said.splitlines() if line.startswith(_SAID)]
    return lines[-1].removeprefix(_SAID) if lines else " ".join(said.split())[-500:]
