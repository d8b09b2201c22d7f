"""The store of completions that are not stored (`GenerationRequest.store`)."""

from __future__ import annotations

from collections.abc import Sequence

from gammaray.blocks import TokenLogprobs
from gammaray.types import TokenOrigin
from orchestrator.cycle.session import Session


class UnstoredSessions:
    """Implements the cycle's SessionStore without Redis.

    Such a session has one owner, this process, so that there is no lease to renew and no epoch to compare. It
    ends with the stream of its client.
    """

    async def append(
        self,
        session: Session,
        token_ids: Sequence[int],
        origins: Sequence[TokenOrigin],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Store nothing."""

    async def renew(self, session: Session) -> None:
        """Return at once: a worker that dropped the session evicted it, so its tokens are sent again."""
