"""Runs the cycles of a session in sequence, each while the previous one is stored and delivered."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

from gammaray.aio import end_tasks
from gammaray.types import TokenOrigin
from orchestrator.cycle.protocols import Drafter, GammaController, SessionStore, Verifier
from orchestrator.cycle.run import run_cycle
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Cycle, TokenLogprobs

__all__ = ["run_cycles"]


async def run_cycles(
    session: Session, drafter: Drafter, verifier: Verifier, store: SessionStore, controller: GammaController
) -> AsyncGenerator[Cycle, None]:
    """Yield the session's cycles up to the last one, each after its tokens are stored.

    Storing and delivering a cycle takes about as long as a proposal, on other processors than the workers'.
    So the next cycle starts before that is done; at most one cycle runs ahead of the consumer. Closing the
    iterator cancels it.

    Raises:
        GammarayError: A cycle failed; the cycles before it were yielded.
    """
    ahead = _Ahead(store)
    work = ahead.run(session, drafter, verifier, controller)
    running = asyncio.create_task(work, name=f"cycles of session {session.session_id}")
    running.add_done_callback(ahead.end)
    try:
        while (cycle := await ahead.take()) is not None:
            yield cycle
        running.result()
    finally:
        await end_tasks(running)
        ahead.close()


class _Ahead:
    """Runs cycles without a pause while the consumer keeps up; implements the SessionStore they write to.

    If the consumer waits when a cycle ends, the cycle is queued without blocking, and the first block of the
    next cycle is sent before this one's tokens are written: storing and delivering do not delay a cycle.
    """

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._wanted = asyncio.Semaphore(0)
        self._found = asyncio.Event()
        self._cycles: deque[tuple[Cycle, Coroutine[Any, Any, None]]] = deque()
        self._write: Coroutine[Any, Any, None] | None = None
        self._is_over = False

    async def run(
        self, session: Session, drafter: Drafter, verifier: Verifier, controller: GammaController
    ) -> None:
        """Run cycles up to the one that ends the session."""
        while not self._is_over:
            cycle = await run_cycle(session, drafter, verifier, self, controller)
            await self._wanted.acquire()
            assert self._write is not None
            self._cycles.append((cycle, self._write))
            self._write, self._is_over = None, cycle.finish_reason is not None
            self._found.set()

    def append(
        self,
        session: Session,
        token_ids: Sequence[int],
        origins: Sequence[TokenOrigin],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Coroutine[Any, Any, None]:
        """Prepare the write, which `take` awaits later; return a no-op coroutine."""
        self._write = self._store.append(session, token_ids, origins, logprobs)
        return _nothing()

    async def take(self) -> Cycle | None:
        """Return the next cycle after it is stored, or None after the last one or a failure."""
        self._wanted.release()
        if not self._cycles and not self._is_over:
            self._found.clear()
            await self._found.wait()
        if not self._cycles:
            return None
        cycle, write = self._cycles.popleft()
        await write
        return cycle

    def end(self, _: object) -> None:
        """Mark the run as over and wake the consumer."""
        self._is_over = True
        self._found.set()

    def close(self) -> None:
        """Drop pending writes: their tokens were not delivered to a client."""
        for write in [self._write, *(write for _, write in self._cycles)]:
            if write is not None:
                write.close()


async def _nothing() -> None:
    """Do nothing; stands in for a deferred write."""
