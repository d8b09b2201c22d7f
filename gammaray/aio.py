"""Ending background tasks for certain."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

__all__ = ["END_S", "end_tasks", "num_cancellations"]

_log = logging.getLogger(__name__)

_AGAIN_S = 1.0

END_S = 30.0
"""How long tasks are waited for, in seconds: far longer than any that can be cancelled takes to end."""


async def end_tasks(*tasks: asyncio.Task[Any], timeout_s: float = END_S) -> None:
    """Cancel tasks and wait until all are over; what they raise is dropped.

    Before Python 3.12 `asyncio.wait_for` swallows a cancellation that comes together with its result, so that
    a loop around it goes on for ever. Therefore they are cancelled again until they end. Those that do not
    end in time are logged as an error, by name, and left alone: a shutdown that goes on without them is
    better than one that never ends.

    Args:
        tasks: Of the running event loop; those that are over already count as ended.
        timeout_s: How long to wait for all of them together, in seconds.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    running = {task for task in tasks if not task.done()}
    while running and (left_s := deadline - loop.time()) > 0:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=min(_AGAIN_S, left_s))
    if running:
        names = ", ".join(sorted(task.get_name() for task in running))
        _log.error("tasks did not end within %g s of their cancellation: %s", timeout_s, names)
    await asyncio.gather(*(task for task in tasks if task.done()), return_exceptions=True)


def num_cancellations() -> int:
    """Return how often the running task was asked to end; always 0 before Python 3.11.

    Whoever tries again after a failure compares it with what it was before: gRPC may tell a cancellation that
    comes together with a message as a status of the call, or as the end of the stream.
    """
    task = asyncio.current_task()
    if task is None or sys.version_info < (3, 11):
        return 0
    return task.cancelling()
