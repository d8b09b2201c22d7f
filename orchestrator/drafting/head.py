"""Drafting by a head in the target worker: nothing is asked for, the block to verify names a shape."""

from __future__ import annotations

from gammaray.blocks import Shape
from gammaray.errors import UnavailableError
from gammaray.types import DrafterKind, Proposal
from orchestrator.cycle.session import Session
from orchestrator.workers.drafter import Readiness


class TargetHead:
    """Stands for the head of the session's target worker among the drafters; implements ModelDrafter.

    The head drafts and the target verifies in one call, see `orchestrator.cycle.run`.
    """

    kind = DrafterKind.HEAD
    address = ""

    def prepare(self, session: Session) -> Readiness:
        """Return whether the worker in use has a head, and the hidden states that it reads."""
        if not session.has_head:
            return Readiness.ABSENT
        return Readiness.READY if session.num_emitted else Readiness.READING

    async def propose(self, session: Session, shape: Shape) -> Proposal:
        """Raise UnavailableError: the head proposes in the target worker only."""
        raise UnavailableError("the head drafts in the target worker")

    def prefer(self, session: Session, address: str) -> None:
        """Do nothing: the target worker is the verifier's choice."""

    def release(self, session: Session) -> None:
        """Do nothing: the target worker releases them with the session."""
