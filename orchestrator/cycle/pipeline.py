"""The cycles of a session in a row, each running while the one before is stored and delivered."""

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
    """Yield the session's cycles up to the one that ends it, each once its tokens are stored.

    Storing and delivering a cycle takes about as long as a proposal, and needs other processors than the
    workers do: the next cycle starts before, and at most one runs ahead of the consumer. Closing the iterator
    cancels it.

    Raises:
        GammarayError: A cycle failed; those before it were yielded.
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
    """Runs cycles without a pause as long as the consumer keeps up; also the store that they write to.

    A cycle that ends while the consumer waits for it is handed over in passing, and the next one's first
    block leaves before the write of this one: nothing of storing and delivering is on a cycle's path.
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
        """Prepare the write, which `take` does; returns an empty one."""
        self._write = self._store.append(session, token_ids, origins, logprobs)
        return _nothing()

    async def take(self) -> Cycle | None:
        """Return the next cycle once it is stored, or None after the last one or a failure."""
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
        """No further cycle will come."""
        self._is_over = True
        self._found.set()

    def close(self) -> None:
        """Drop the writes that were not done: nobody was shown their tokens."""
        for write in [self._write, *(write for _, write in self._cycles)]:
            if write is not None:
                write.close()


async def _nothing() -> None:
    """Do nothing, in place of a write that comes later."""
