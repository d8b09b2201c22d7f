"""Ending background tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["end_tasks"]

_AGAIN_S = 1.0


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until all are over; what they raise is dropped.

    Before Python 3.12 `asyncio.wait_for` swallows a cancellation that comes together with its result, so that
    a loop around it goes on for ever. Therefore they are cancelled again until they end.
    """
    running = {task for task in tasks if not task.done()}
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
