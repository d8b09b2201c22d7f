"""One turn of a session in a replica: its cycles, their chunks, and what is left behind when it ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from gammaray.errors import CancelledError, NotFoundError
from gammaray.types import Chunk, FinishReason
from orchestrator.cycle.handover import SessionHandover
from orchestrator.cycle.pipeline import run_cycles
from orchestrator.cycle.types import Cycle
from orchestrator.drafting.corpus import Corpus
from orchestrator.drafting.factory import Drafting
from orchestrator.drafting.session_drafter import DrafterChoice, SessionDrafter
from orchestrator.sessions.lifecycle import OpenSession
from orchestrator.sessions.progress import ChunkBuilder
from orchestrator.storage.session_store import RedisStore
from orchestrator.storage.unstored import UnstoredSessions
from orchestrator.telemetry.cycle_log import CycleLog
from orchestrator.telemetry.metrics import OrchestratorMeter
from orchestrator.workers.fleet import Fleet
from orchestrator.workers.verifier import FencedVerifier, RemoteVerifier

HANDOVER_PERIOD = 4
"""Cycles between two writes of a session's handover."""


class RunningTurn:
    """Runs the cycles of one turn and makes chunks of them; a context manager.

    Leaving the block stores the handover with the next commit, releases the session on its workers and
    flushes the cycle log.
    """

    def __init__(
        self,
        opened: OpenSession,
        progress: ChunkBuilder,
        drafter: SessionDrafter,
        controller: DrafterChoice,
        verifier: RemoteVerifier,
        cycle_log: CycleLog,
        *,
        store: RedisStore | UnstoredSessions,
        meter: OrchestratorMeter,
        drafting: Drafting,
        corpus: Corpus,
        fleet: Fleet,
    ) -> None:
        self._session, self._is_stored = opened.session, opened.request.store
        self._store, self._meter, self._drafting = store, meter, drafting
        self._corpus, self._fleet = corpus, fleet
        self._progress, self._cycle_log = progress, cycle_log
        self._drafter, self._controller, self._verifier = drafter, controller, verifier
        self._error: BaseException | None = None
        handover = opened.handover
        drafter.prefer(opened.session, handover.draft)
        verifier.prefer(opened.session, handover.target)

    async def reach(self) -> None:
        """Wait for a target worker; raises as `RemoteVerifier.verify` does without one."""
        await self._verifier.reach(self._session)

    def run_cycles(self) -> AsyncGenerator[Cycle, None]:
        return run_cycles(
            self._session,
            self._drafter,
            FencedVerifier(self._verifier, self._store.renew),
            self._store,
            self._controller,
            self._cycle_log.observe,
        )

    def chunk(self, cycle: Cycle) -> Chunk:
        """Count a stored cycle and return its chunk."""
        self._cycle_log.stored()
        # A plain cycle has one token; one that was decoded ahead may have more.
        plain_cycle_s = self._drafting.plain_cycle_s if cycle.ahead_s is None else None
        self._meter.cycle(cycle, plain_cycle_s)
        if cycle.finish_reason is not None:
            self._release()
            if self._is_stored:
                self._corpus.add(self._session)
        chunk = self._progress.chunk(cycle, plain_cycle_s)
        if self._progress.counters.cycles % HANDOVER_PERIOD == 1:
            self._session.state = self._handover()
        return chunk

    def cancelled(self, error: CancelledError) -> Chunk:
        self._error = error
        return self._progress.piece((), "", FinishReason.CANCELLED)

    def _release(self) -> None:
        """Release the session on its workers, which keep its caches as long as none needs the memory."""
        self._drafter.release(self._session)
        self._verifier.release(self._session)

    def _handover(self) -> bytes:
        return SessionHandover(
            counters=self._progress.counters,
            elapsed_s=self._progress.elapsed_s,
            target=self._verifier.address,
            draft=self._drafter.address,
        ).to_bytes()

    def __enter__(self) -> RunningTurn:
        return self

    def __exit__(self, _: object, error: BaseException | None, *rest: object) -> None:
        session = self._session
        self._cycle_log.finish(error or self._error)
        if isinstance(error, NotFoundError):  # deleted; workers may have received its tokens again since
            self._fleet.release(session.session_id, session.epoch, forget=True)
        session.state = self._handover()
        self._release()
