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
    command = [sys.executable, "-m", f"services.{role}_worker", *map(str, options)]
    env = {**os.environ, **environment}
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=env)
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        word, address = line.decode().split()
        assert word == "listening"
        yield process, address
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
