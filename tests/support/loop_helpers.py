"""Watches an event loop: what one turn of it costs."""

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

MAX_TURN_S = 0.05
"""No request may keep the event loop from others for longer, whatever it holds."""


WAKE_S = 0.001
"""The watcher sleeps between looks: always ready, it would take the GIL from the threads of a request."""


@dataclass
class Watch:
    # CPU seconds of the loop's thread in its longest turn, or up to a millisecond more: the callbacks of one
    # turn run one after the other, and new events wait. CPU time, since other processes share the machine.
    longest_s: float = 0.0


@contextlib.asynccontextmanager
async def watching() -> AsyncIterator[Watch]:
    """Watch the running loop until the context is left."""
    watch = Watch()

    async def look() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(WAKE_S)
            now = time.thread_time()
            watch.longest_s = max(watch.longest_s, now - last)
            last = now

    gc.collect()
    gc.freeze()  # a collection of what other tests left is no cost of a request
    task = asyncio.create_task(look())
    try:
        await asyncio.sleep(0)
        yield watch
        await asyncio.sleep(2 * WAKE_S)  # the watcher sees the turn that ended what was watched
    finally:
        task.cancel()
        gc.unfreeze()
