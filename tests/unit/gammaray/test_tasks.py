"""Tasks end even if they swallow their first cancellation."""

import asyncio
import contextlib
import logging
import time
from unittest.mock import AsyncMock

from gammaray.aio import end_tasks


async def test_end_tasks_survives_a_swallowed_cancellation_and_drops_failures():
    """A loop around `asyncio.wait_for` swallows one before Python 3.12."""
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed > 1:
                    raise

    fail = AsyncMock(side_effect=RuntimeError("of no interest"))
    failed, done = asyncio.create_task(fail()), asyncio.create_task(asyncio.sleep(0))
    await asyncio.wait([failed, done])
    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await asyncio.wait_for(end_tasks(task, failed, done), 60)
    assert task.cancelled()
    assert swallowed == 2
    await end_tasks()


async def test_end_tasks_gives_up_on_those_that_never_end_and_names_them(caplog):
    released = asyncio.Event()

    async def deaf() -> None:
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(30)

    tasks = [asyncio.create_task(deaf(), name=name) for name in ("reader 7", "link 3")]
    good = asyncio.create_task(asyncio.sleep(30), name="willing")
    await asyncio.sleep(0)
    start = time.monotonic()
    with caplog.at_level(logging.ERROR, logger="gammaray.aio"):
        await asyncio.wait_for(end_tasks(*tasks, good, timeout_s=0.2), 60)
    assert 0.15 < time.monotonic() - start < 20
    assert good.cancelled()
    assert not any(task.done() for task in tasks)
    released.set()
    await end_tasks(*tasks)
    assert all(task.done() for task in tasks)
    (record,) = (one for one in caplog.records if one.name == "gammaray.aio")  # not of other threads
    assert "within 0.2 s" in record.message
    assert record.message.endswith(": link 3, reader 7")
