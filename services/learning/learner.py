"""The sessions of a worker whose drafter learns, and what is recorded of them when they end."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from gammaray.errors import InvalidArgumentError
from gammaray.types import Proposal
from services.engine.core.batch import Runner
from services.heads.loading import names_head
from services.learning.records import Buffer
from services.learning.versions import Drafting, Versions, is_own
from services.scheduling.sessions import SessionCopy

MAX_KEPT = 32
"""Sessions at a time whose states are buffered: for SmolLM2 3 MB each, for a target of 8B 20 MB."""

T = TypeVar("T")


class Learner(Generic[T]):
    """Follows the sessions of one worker.

    Attributes:
        reads_states: Whether the drafter is a head, for which the target's hidden states are kept.
    """

    reads_states: ClassVar[bool] = True

    def __init__(self, versions: Versions[T]) -> None:
        self.versions = versions
        self._sessions: dict[str, Drafting[T]] = {}

    def close(self) -> None:
        """End what runs beside the sessions."""
        self.versions.close()

    def number_of(self, session_id: str) -> int:
        """Return the number of the version that drafts for a session."""
        session = self._sessions.get(session_id)
        return 0 if session is None else session.number

    def named(self, session_id: str, proposal: Proposal) -> Proposal:
        """Return a proposal with the version that made it."""
        number = self.number_of(session_id)
        return replace(proposal, version=number) if number else proposal

    def expect(self, session: SessionCopy, proposal: Proposal) -> Proposal:
        """Note a session's proposal, whose first token the next committed one accepts or not; name it."""
        drafting = self._sessions[session.session_id]
        drafting.tested = (len(session.tokens), proposal.token_ids[0]) if proposal else None
        return self.named(session.session_id, proposal)

    def keeps(self, session_id: str) -> bool:
        """Whether a session, which may begin here, is recorded when it ends."""
        return self._session(session_id, 0).is_kept

    def take(self, session_id: str, start: int, states: Tensor) -> None:
        """Keep the states [positions, taps, hidden_size] of committed positions, from `start` on."""
        session = self._session(session_id, start + len(states))
        if session.is_kept and session.buffer is not None:
            session.buffer.take(start, states)

    def end(self, session: SessionCopy) -> None:
        """Forget a session; its stream is recorded if its tenant agreed."""
        drafting = self._sessions.pop(session.session_id, None)
        if drafting is not None and drafting.is_kept:
            self.versions.record(session, drafting.buffer)

    def forget(self, session_id: str) -> None:
        """Delete what was recorded of a session, and record nothing when it ends."""
        if (drafting := self._sessions.get(session_id)) is not None:
            drafting.is_kept = False
        self.versions.forget(session_id)

    def _session(self, session_id: str, num_tokens: int) -> Drafting[T]:
        """Return a session; one that begins here has so many tokens."""
        found = self._sessions.get(session_id)
        if found is None:
            name, buffer = self._name_of(session_id), Buffer() if self.reads_states else None
            has_room = buffer is None or sum(one.is_kept for one in self._sessions.values()) < MAX_KEPT
            number, version = self.versions.choose(name, session_id, num_tokens)
            found = Drafting(name, number, version, name is not None and has_room, buffer)
            self._sessions[session_id] = found
        return found

    def _name_of(self, session_id: str) -> str | None:
        """Return the drafter that serves a session, see `Versions.name_of`."""
        return self.versions.name_of(session_id)


class LearningDraftModel(Learner[Runner]):
    """Which version of a draft model computes each session of the one engine of a draft worker."""

    reads_states = False

    def runner_of(self, session_id: str) -> Runner:
        """Return what computes a session."""
        session = self._sessions.get(session_id)
        return self.versions.choose(None, session_id, 0)[1] if session is None else session.version

    def follow(self, session: SessionCopy) -> bool:
        """Follow a session's committed tokens; return whether its cache begins anew, with another version."""
        is_new = session.session_id not in self._sessions
        return self.versions.follow(self._session(session.session_id, len(session.tokens)), session) or is_new


def check_head(learn: str, head: str) -> None:
    """Raise InvalidArgumentError if a head cannot learn, as it was not made by `gammaray train`."""
    if not (names_head(head) and is_own(head)):
        raise InvalidArgumentError("learn", learn, f"empty, as {head} is no head of gammaray train")
