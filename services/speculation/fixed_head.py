"""What drafts in a target worker, as schedulers call it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from services.scheduling.metrics import NO_FIRST_TOKENS
from services.scheduling.sessions import SessionCopy


class Head:
    """A drafter in a target worker, or none; it keeps nothing."""

    first_tokens: Mapping[tuple[str, str], int] = NO_FIRST_TOKENS  # by arm and outcome

    def close(self) -> None:
        """End the threads and processes that were started."""

    def take(self, session_id: str, start: int, states: Tensor) -> None:
        """Keep the states [positions, taps, hidden_size] of committed positions, from `start` on."""

    def end(self, session: SessionCopy) -> None:
        """Forget a session."""

    def forget(self, session_id: str) -> None:
        """Delete what was recorded of a session."""


class FixedHead(Head):
    """A head, or none, of an engine that drafts by itself; this one does not learn."""

    number = 0  # of the version that drafts

    def keeps(self, session_id: str) -> bool:
        """Whether a session, which may begin here, is recorded when it ends."""
        return False

    def take_turns(self, now_s: float) -> None:
        """Switch to the version that drafts at a time; roll back one that cannot be loaded."""

    def count(self, number: int, session_id: str, position: int, is_accepted: bool) -> None:
        """Count a version's proposal of a session's token at a position, and whether it was accepted."""
