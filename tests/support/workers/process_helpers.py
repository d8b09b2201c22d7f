"""Workers as processes of their own."""

import asyncio
import os
import subprocess
import sys
from contextlib import asynccontextmanager

START_TIMEOUT_S = 150


@asynccontextmanager
async def spawned(role, *options, **environment):
    """A worker process and its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"services.{role}_worker",
        *map(str, options),
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        word, address = line.decode().split()
        assert word == "listening"
        yield process, address
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
