"""The cycles of a session in a row, each running while the one before is stored and delivered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from gammaray.types import TokenOrigin
from orchestrator.cycle import Cycle, Drafter, GammaController, SessionStore, Verifier, run_cycle
from orchestrator.session import Session

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
    behind = _WriteBehind(store)
    running = asyncio.create_task(run_cycle(session, drafter, verifier, behind, controller))
    try:
        is_last = False
        while not is_last:
            cycle = await running
            written, is_last = behind.last, cycle.finish_reason is not None
            if not is_last:
                running = asyncio.create_task(run_cycle(session, drafter, verifier, behind, controller))
            if written is not None:
                await written
            yield cycle
    finally:
        running.cancel()
        await asyncio.gather(running, *([behind.last] if behind.last else []), return_exceptions=True)


class _WriteBehind:
    """Starts writes in order and lets the cycle go on; `last` is the newest one."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self.last: asyncio.Task[None] | None = None

    async def append(
        self, session: Session, token_ids: Sequence[int], origins: Sequence[TokenOrigin]
    ) -> None:
        """Wait for the write before, and start this one.

        Raises:
            GammarayError: The write before failed.
        """
        if self.last is not None:
            await self.last
        # The write reads the session in its first step, which comes before the next cycle's.
        self.last = asyncio.create_task(self._store.append(session, token_ids, origins))
