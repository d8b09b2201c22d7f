"""Drafts with the versions of a draft model that are trained while it serves.

A version is a runner of the one engine, which computes each session with that of its version.
"""

from __future__ import annotations

from dataclasses import replace

from gammaray.types import Proposal
from services.engine.core.batch import Runner
from services.learning.versions import Drafting, Versions
from services.scheduling.sessions import SessionCopy


class LearningDraftModel:
    """Which version drafts for each session of a draft worker.

    Args:
        versions: The versions.
    """

    def __init__(self, versions: Versions[Runner]) -> None:
        self.versions = versions
        self._sessions: dict[str, Drafting[Runner]] = {}

    def runner_of(self, session_id: str) -> Runner:
        """Return what computes a session."""
        session = self._sessions.get(session_id)
        return self.versions.choose(None, session_id, 0)[1] if session is None else session.version

    def number_of(self, session_id: str) -> int:
        """Return the number of the version that drafts for a session."""
        session = self._sessions.get(session_id)
        return 0 if session is None else session.number

    def follow(self, session: SessionCopy) -> bool:
        """Follow a session's committed tokens; return whether its cache begins anew, with another version."""
        drafting, session_id = self._sessions.get(session.session_id), session.session_id
        if drafting is not None:
            return self.versions.follow(drafting, session)
        name = self.versions.name_of(session_id)
        version = self.versions.choose(name, session_id, len(session.tokens))
        self._sessions[session_id] = Drafting(name, *version)
        return True

    def named(self, session_id: str, proposal: Proposal) -> Proposal:
        """Return a proposal with the version that made it."""
        number = self.number_of(session_id)
        return replace(proposal, version=number) if number else proposal

    def expect(self, session: SessionCopy, proposal: Proposal) -> None:
        """Note a session's proposal."""
        self._sessions[session.session_id].expect(session, proposal)

    def end(self, session: SessionCopy) -> None:
        """Forget a session; its stream is recorded if its tenant agreed."""
        drafting = self._sessions.pop(session.session_id, None)
        if drafting is not None and drafting.name is not None:
            self.versions.record(session)

    def forget(self, session_id: str) -> None:
        """Delete what was recorded of a session, and record nothing when it ends."""
        if (drafting := self._sessions.get(session_id)) is not None:
            drafting.name = None
        self.versions.forget(session_id)
