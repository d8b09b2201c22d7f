"""When a worker drops a session, its owner asks the store whose the session is before it goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gammaray.errors import CancelledError, UnavailableError
from gammaray.types import Proposal
from orchestrator.protocols import Verifier
from orchestrator.session import Session
from orchestrator.verdicts import Verdict

__all__ = ["TRIES", "FencedVerifier"]

TRIES = 5
"""Verifications of one cycle that may be answered with CANCELLED before the session ends with an error."""


class FencedVerifier:
    """Verifies through another verifier; implements the cycle's Verifier.

    A worker answers CANCELLED when the session was released: it was cancelled or deleted, or its owner was
    taken for dead. The store knows which; in the last case the worker is fed again, a few times. Only the
    store says that a session was cancelled: what a worker answers never does.

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
            UnavailableError: Workers keep dropping the session, though it is the caller's.
            GammarayError: As the verifier's.
        """
        for _ in range(TRIES):
            try:
                return await self._verifier.verify(session, proposal)
            except CancelledError as error:
                dropped = error
            await self._renew(session)
        raise UnavailableError(
            f"session {session.session_id}: workers dropped it {TRIES} times in one cycle, last: {dropped}"
        )
