"""Runs the cycles of a session in sequence, each while the previous one is stored and delivered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from gammaray.aio import end_tasks
from orchestrator.cycle.protocols import Drafter, GammaController, SessionStore, Verifier
from orchestrator.cycle.run import run_cycle
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Cycle

_Write = Coroutine[Any, Any, None]


async def run_cycles(
    session: Session,
    drafter: Drafter,
    verifier: Verifier,
    store: SessionStore,
    controller: GammaController,
    on_cycle: Callable[[Cycle], None] | None = None,
) -> AsyncGenerator[Cycle, None]:
    """Yield the session's cycles up to the last one, each after its tokens are stored.

    Storing and delivering a cycle takes about as long as a proposal, on other processors than the workers'.
    So the next cycle starts before that is done; at most one cycle runs ahead of the consumer. Closing the
    iterator cancels it. `on_cycle` is called with each cycle when it has run, before it is stored.

    Raises:
        GammarayError: A cycle or its write failed; the cycles before it were yielded.
    """
    queue = _CycleQueue()

    async def run() -> None:
        is_over = False
        while not is_over:
            cycle = await run_cycle(session, drafter, verifier, controller)
            if on_cycle is not None:
                on_cycle(cycle)
            # The write reads the session in this call, before the next cycle changes it.
            write = store.append(session, cycle.token_ids, cycle.origins, cycle.logprobs)
            is_over = cycle.finish_reason is not None
            await queue.put(cycle, write)

    running = asyncio.create_task(run(), name=f"cycles of session {session.session_id}")
    running.add_done_callback(queue.end)
    try:
        while (cycle := await queue.take()) is not None:
            yield cycle
        running.result()
    finally:
        await end_tasks(running)
        queue.close()


class _CycleQueue:
    """Passes cycles with their pending writes from the task that runs them to the consumer.

    If the consumer waits when a cycle ends, `put` does not block, and the first block of the next cycle is
    sent before this one's tokens are written: storing and delivering do not delay a cycle.
    """

    def __init__(self) -> None:
        self._wanted = asyncio.Semaphore(0)
        self._cycles: asyncio.Queue[tuple[Cycle, _Write] | None] = asyncio.Queue()  # None: the run is over
        self._blocked: _Write | None = None

    async def put(self, cycle: Cycle, write: _Write) -> None:
        """Queue a cycle once the consumer has asked for it."""
        self._blocked = write
        await self._wanted.acquire()
        self._blocked = None
        self._cycles.put_nowait((cycle, write))

    async def take(self) -> Cycle | None:
        """Return the next cycle after it is stored, or None after the last one or a failure."""
        self._wanted.release()
        if (found := await self._cycles.get()) is None:
            return None
        cycle, write = found
        await write
        return cycle

    def end(self, _: object) -> None:
        """Mark the run as over."""
        self._cycles.put_nowait(None)

    def close(self) -> None:
        """Drop pending writes: their tokens were not delivered to a client."""
        if self._blocked is not None:
            self._blocked.close()
        while not self._cycles.empty():
            if (found := self._cycles.get_nowait()) is not None:
                found[1].close()
