"""The store of completions that are not stored (`GenerationRequest.store`)."""

from __future__ import annotations

from collections.abc import Sequence

from gammaray.blocks import TokenLogprobs
from gammaray.types import TokenOrigin
from orchestrator.cycle.session import Session


class UnstoredSessions:
    """A SessionStore without Redis: each session has one owner and ends with its client's stream."""

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
