"""Drafts with the versions of a draft model that are trained while it serves.

A version is a runner of the one engine, which computes each session with that of its version.
"""

from __future__ import annotations

from dataclasses import replace

from gammaray.types import Proposal
from services.engine.core.batch import Runner
from services.learning.learner import Learner
from services.scheduling.sessions import SessionCopy


class LearningDraftModel(Learner[Runner]):
    """Which version drafts for each session of a draft worker."""

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
        drafting = self._sessions.get(session.session_id)
        if drafting is not None:
            return self.versions.follow(drafting, session)
        self._begin(session.session_id, len(session.tokens))
        return True

    def named(self, session_id: str, proposal: Proposal) -> Proposal:
        """Return a proposal with the version that made it."""
        number = self.number_of(session_id)
        return replace(proposal, version=number) if number else proposal

    def expect(self, session: SessionCopy, proposal: Proposal) -> None:
        """Note a session's proposal."""
        self._sessions[session.session_id].expect(session, proposal)
