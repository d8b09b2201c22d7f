"""Background tasks, and their reliable cancellation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from gammaray.errors import GammarayError

_log = logging.getLogger(__name__)

_AGAIN_S = 1.0

END_S = 30.0
"""Default wait for cancelled tasks, in seconds: far longer than any cancellable task takes to end."""


async def end_tasks(*tasks: asyncio.Task[Any], timeout_s: float = END_S) -> None:
    """Cancel tasks of the running event loop and wait until all have ended; their exceptions are dropped.

    Before Python 3.12 `asyncio.wait_for` swallows a cancellation that arrives together with its result, so
    that a loop around it never ends. Therefore tasks are cancelled repeatedly until they end. Tasks that do
    not end in time are logged as an error, by name, and abandoned, so that a shutdown cannot hang.
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
    """Return the number of pending cancellation requests of the running task.

    Retry loops compare the number before and after a failed call: gRPC may report a cancellation that arrives
    together with a message as a status of the call, or as the end of the stream.
    """
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


class BackgroundTasks:
    """Work that goes on after its caller returned; logs start with `failure` if it fails."""

    def __init__(self, log: logging.Logger, failure: str) -> None:
        self._log, self._failure = log, failure
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, object], subject: str) -> None:
        """Begin work; returns at once. The log names its subject."""
        task = asyncio.create_task(self._run(work, subject))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Wait until all work has ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, work: Coroutine[Any, Any, object], subject: str) -> None:
        try:
            await work
        except GammarayError as error:
            self._log.warning("%s: %s: %s", self._failure, subject, error)
