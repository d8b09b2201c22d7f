"""Fallback drafters of one session: a draft worker, another draft worker, prompt lookup, gamma 0.

When a drafter fails, the cycle continues at once with the next one. Later cycles stay on it while no draft
worker is usable, and return to draft workers as soon as one is. The choice of drafter depends on past cycles
and failures, never on the noise of a future token, so all verification methods stay exact.

Each drafter kind has its own gamma controller: acceptance and costs of one kind do not apply to another.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from gammaray.errors import GammarayError
from gammaray.types import DrafterKind, Proposal
from orchestrator.cycle.handover import Counts, SessionHandover
from orchestrator.cycle.protocols import GammaController
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Cycle, Shape
from orchestrator.drafting.prompt_lookup import NgramDrafter
from orchestrator.gamma.adaptive import AdaptiveGamma
from orchestrator.workers.drafter import Readiness, RemoteDrafter

__all__ = ["FallbackDrafter"]

_log = logging.getLogger(__name__)


class FallbackDrafter:
    """Implements the cycle's Drafter and its GammaController, which must be the same object.

    Args:
        session: The session.
        top: The best drafter kind that the request allows.
        remote: Proposes through draft workers.
        controllers: Gamma controller of each drafter kind from `top` down.

    Attributes:
        rung: Drafter kind of the current or last cycle.
    """

    def __init__(
        self,
        session: Session,
        top: DrafterKind,
        remote: RemoteDrafter,
        controllers: Mapping[DrafterKind, GammaController],
    ) -> None:
        self._session, self._top = session, top
        self._remote, self._ngram = remote, NgramDrafter()
        self._controllers = controllers
        self._has_fallen = False
        self.rung = top

    def next_shape(self) -> Shape:
        """Choose the drafter kind of the next cycle, and return the shape that its controller chooses."""
        self.rung, self._has_fallen, is_fallback = self._top, False, False
        if self._top is DrafterKind.MODEL:
            readiness = self._remote.prepare(self._session)
            if readiness is not Readiness.READY:
                self.rung, is_fallback = DrafterKind.NGRAM, readiness is Readiness.ABSENT
        shape = self._controllers[self.rung].next_shape()
        return replace(shape, is_fallback=True) if is_fallback else shape

    async def propose(self, session: Session, shape: Shape) -> Proposal:
        """Return the proposal of this cycle's drafter, or of prompt lookup if the draft worker fails."""
        if self.rung is DrafterKind.MODEL:
            try:
                return await self._remote.propose(session, shape)
            except GammarayError as error:
                _log.debug("session %s falls a rung: %s", session.session_id, error)
                self._has_fallen = True
        return replace(self._ngram.look_up(session, shape.depth), is_fallback=self._has_fallen)

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle; one whose draft worker failed is evidence for neither drafter."""
        if not self._has_fallen:
            self._controllers[self.rung].observe(cycle)

    @property
    def acceptance(self) -> dict[DrafterKind, Counts]:
        """Acceptance counts of the adaptive controllers, by drafter kind."""
        adaptive = ((r, c) for r, c in self._controllers.items() if isinstance(c, AdaptiveGamma))
        return {rung: controller.acceptance.counts for rung, controller in adaptive}

    def recall(self, handover: SessionHandover) -> None:
        """Restore the acceptance counts and the draft worker of the session's previous owner."""
        for rung, controller in self._controllers.items():
            if rung in handover.acceptance and isinstance(controller, AdaptiveGamma):
                controller.acceptance.recall(*handover.acceptance[rung])
        if self._top is DrafterKind.MODEL:
            self._remote.prefer(self._session, handover.draft)

    @property
    def draft_address(self) -> str:
        """host:port of the draft worker in use, "" for none."""
        return self._remote.address

    def leave(self, session: Session) -> None:
        """Detach from the draft worker, which keeps the session's cache; returns at once."""
        self._remote.leave(session)

    def release(self, session: Session) -> None:
        """Release the session's cache on the draft worker; returns at once."""
        self._remote.release(session)
