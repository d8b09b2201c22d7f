"""A cluster per candidate, by `gammaray up` on free loopback ports."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from gammaray.client.async_client import AsyncClient
from gammaray.errors import UnavailableError

START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 45.0
_HOST = "127.0.0.1"
_READY = re.compile(rb"ready http=\S+ grpc=(\S+)")
_SAID = "gammaray: "


class UnfitError(Exception):
    """A cluster does not start with these models; the message says why."""


@asynccontextmanager
async def cluster(models: Sequence[str]) -> AsyncIterator[AsyncClient]:
    """Start a cluster and yield a client of it.

    Args:
        models: Options of `gammaray up` that name its models.

    Raises:
        UnfitError: The models cannot be served.
        UnavailableError: It did not become ready in time.
    """
    ports = [option for name in ("--http-port", "--grpc-port") for option in (name, str(_free_port()))]
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
            address = await asyncio.wait_for(_ready(process), START_TIMEOUT_S + _STOP_TIMEOUT_S)
            async with AsyncClient(address, timeout_s=START_TIMEOUT_S) as client:
                yield client
        except asyncio.TimeoutError:
            raise UnavailableError(f"gammaray up did not start within {START_TIMEOUT_S:g} s") from None
        except EOFError:
            errors.seek(0)
            raise UnfitError(_reason(errors.read())) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
            except asyncio.TimeoutError:
                process.kill()


async def _ready(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if found := _READY.search(line):
            return found[1].decode()
    raise EOFError


def _reason(said: str) -> str:
    """Return the last line that the launcher wrote itself, else the end of what was written."""
    lines = [line for line in said.splitlines() if line.startswith(_SAID)]
    return lines[-1].removeprefix(_SAID) if lines else " ".join(said.split())[-500:]


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
