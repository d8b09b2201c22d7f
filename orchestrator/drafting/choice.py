"""Chooses the drafter of each cycle and the shape of its proposal."""

from __future__ import annotations

from gammaray.blocks import Shape
from orchestrator.control.adaptive import AdaptiveGamma
from orchestrator.control.fixed import FixedGamma
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Cycle
from orchestrator.drafting.session_drafter import SessionDrafter


class DrafterChoice:
    """Asks a session's drafters what they could propose, and its controller which of it.

    Implements the cycle's GammaController.

    Args:
        session: The session.
        drafter: Its drafters.
        controller: Chooses.
    """

    def __init__(
        self, session: Session, drafter: SessionDrafter, controller: AdaptiveGamma | FixedGamma
    ) -> None:
        self._session, self._drafter, self._controller = session, drafter, controller

    def next_shape(self) -> Shape:
        """Return the shape of the next cycle's proposal, which names its drafter."""
        return self._controller.next_shape(self._drafter.candidates(self._session))

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
        self._controller.observe(cycle)
