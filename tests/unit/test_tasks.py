"""Tasks end, whatever they do with their first cancellation."""

from __future__ import annotations

import asyncio

from gammaray.tasks import end_tasks


async def test_end_tasks_survives_a_swallowed_cancellation():
    """What a loop around `asyncio.wait_for` does before Python 3.12."""
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

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await asyncio.wait_for(end_tasks(task), 5)
    assert task.cancelled()
    assert swallowed == 2


async def test_end_tasks_drops_failures_and_takes_finished_ones():
    async def fail() -> None:
        raise RuntimeError("of no interest")

    failed, done = asyncio.create_task(fail()), asyncio.create_task(asyncio.sleep(0))
    await asyncio.sleep(0.01)
    await end_tasks(failed, done)
    await end_tasks()
    assert failed.done()
    assert done.done()
