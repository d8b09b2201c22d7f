"""A worker that drops a session under its owner: ask the store whose it is before going on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gammaray.errors import CancelledError
from gammaray.types import Proposal
from orchestrator.cycle import Verdict, Verifier
from orchestrator.session import Session

__all__ = ["FencedVerifier"]


class FencedVerifier:
    """Verifies through another verifier; implements the cycle's Verifier.

    A worker answers CANCELLED when somebody released the session: it was cancelled or deleted, or its owner
    was taken for dead. The store knows which; in the last case the worker is fed again.

    Args:
        verifier: The verifier.
        renew: Raises what stands in the way of working on the session.
    """

    def __init__(self, verifier: Verifier, renew: Callable[[Session], Awaitable[None]]) -> None:
        self._verifier, self._renew = verifier, renew

    async def verify(self, session: Session, proposal: Proposal) -> Verdict:
        """Return the target's verdict.

        Raises:
            CancelledError: The session was cancelled.
            FailedPreconditionError: It has another owner by now.
            GammarayError: As the verifier's.
        """
        try:
            return await self._verifier.verify(session, proposal)
        except CancelledError:
            await self._renew(session)
            return await self._verifier.verify(session, proposal)
