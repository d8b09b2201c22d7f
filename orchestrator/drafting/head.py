"""Drafting by a head in the target worker: the block to verify names a shape instead of tokens."""

from __future__ import annotations

from gammaray.blocks import Shape
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import DraftHere
from orchestrator.workers.drafter import Readiness


class TargetHead:
    """Drafts as `RemoteDrafter` does, by the head of the target worker, in the call that verifies."""

    address = ""

    def prepare(self, session: Session) -> Readiness:
        """Return whether the worker in use has a head, and the hidden states that it reads."""
        if not session.has_head:
            return Readiness.ABSENT
        return Readiness.READY if session.num_emitted else Readiness.READING

    async def propose(self, session: Session, shape: Shape) -> DraftHere:
        return DraftHere(shape)

    def prefer(self, session: Session, address: str) -> None:
        """Do nothing: the target worker is the verifier's choice."""

    def release(self, session: Session) -> None:
        """Do nothing: the target worker releases them with the session."""
