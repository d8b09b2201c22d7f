"""The sessions of a worker whose head learns, and what is recorded of them when they end."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor

from gammaray.errors import InvalidArgumentError
from services.heads.loading import names_head
from services.learning.versions import LearningSession, LoadedDrafters, is_own
from services.scheduling.sessions import SessionCopy

MAX_KEPT = 32
"""Sessions at a time whose states are buffered: for SmolLM2 3 MB each, for a target of 8B 20 MB."""

T = TypeVar("T")


class Learner(Generic[T]):
    def __init__(self, versions: LoadedDrafters[T]) -> None:
        self.versions = versions
        self._sessions: dict[str, LearningSession[T]] = {}

    def close(self) -> None:
        self.versions.close()

    def keeps(self, session_id: str) -> bool:
        return self._session(session_id, 0).is_kept

    def take(self, session_id: str, start: int, states: Tensor) -> None:
        session = self._session(session_id, start + len(states))
        if session.is_kept:
            session.buffer.take(start, states)

    def end(self, session: SessionCopy) -> None:
        """Forget a session; its stream is recorded if its tenant agreed."""
        drafting = self._sessions.pop(session.session_id, None)
        if drafting is not None and drafting.is_kept:
            self.versions.record(session, drafting)

    def forget(self, session_id: str) -> None:
        """Delete what was recorded of a session, and record nothing when it ends."""
        if (drafting := self._sessions.get(session_id)) is not None:
            drafting.is_kept = False
        self.versions.forget(session_id)

    def _session(self, session_id: str, num_tokens: int) -> LearningSession[T]:
        """Return a session; one that begins here has so many tokens."""
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = self.versions.begin(session_id, num_tokens)
            num_kept = sum(other.is_kept for other in self._sessions.values())
            session.is_kept = session.is_kept and num_kept <= MAX_KEPT
        return session


def check_head(learn: str, head: str) -> None:
    """Raise InvalidArgumentError if a head cannot learn, as it was not made by `gammaray train`."""
    if not (names_head(head) and is_own(head)):
        raise InvalidArgumentError("learn", learn, f"empty, as {head} is no head of gammaray train")
