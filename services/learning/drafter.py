"""Drafts with the versions of a head that are trained while it serves.

A session that changes its version gives it the newest hidden states, so that it proposes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import replace

from torch import Tensor

from gammaray.types import Proposal
from services.learning.learner import Learner
from services.learning.versions import SPAN, LearningSession, LoadedDrafters
from services.scheduling.sessions import SessionCopy
from services.speculation.head_drafter import HeadDrafter
from services.speculation.local_drafter import Request, TargetHead


class LearningDrafter(Learner[HeadDrafter], TargetHead):
    """Drafts for each session with one of several versions of a head."""

    def __init__(self, taps: Sequence[int], versions: LoadedDrafters[HeadDrafter]) -> None:
        super().__init__(versions)
        self.taps, self.first_tokens = taps, versions.first_tokens

    def take(self, session_id: str, start: int, states: Tensor) -> None:
        super().take(session_id, start, states)
        self._sessions[session_id].version.take(session_id, start, states)

    def end(self, session: SessionCopy) -> None:
        if (drafting := self._sessions.get(session.session_id)) is not None:
            drafting.version.drop(session.session_id)
        super().end(session)

    def draft(self, requests: Sequence[Request]) -> list[Proposal]:
        by_place: dict[int, Proposal] = {}
        for drafter, places in self._by_drafter(requests):
            proposals = drafter.draft([requests[place] for place in places])
            by_place |= dict(zip(places, proposals, strict=True))
        return [self._expect(copy, by_place[place]) for place, (copy, _, _) in enumerate(requests)]

    def prepare(self, requests: Sequence[Request], stop: c_int32) -> None:
        for drafter, places in self._by_drafter(requests):
            drafter.prepare([requests[place] for place in places], stop)

    def _by_drafter(self, requests: Sequence[Request]) -> list[tuple[HeadDrafter, list[int]]]:
        places: dict[HeadDrafter, list[int]] = {}
        for place, (copy, _, _) in enumerate(requests):
            session = self._session(copy.session_id, len(copy.tokens))
            before = session.version
            self._follow(session, copy)
            if session.version is not before:
                before.drop(copy.session_id)
                if session.buffer.parts:
                    start, states = session.buffer.states()
                    session.version.take(copy.session_id, start, states)
            places.setdefault(session.version, []).append(place)
        return list(places.items())

    def _follow(self, drafting: LearningSession[HeadDrafter], session: SessionCopy) -> None:
        """Count the outcome of a session's last proposal, and choose what drafts from here."""
        tested, drafting.tested = drafting.tested, None
        if tested is not None and len(session.tokens) > tested[0]:
            is_accepted = session.tokens[tested[0]] == tested[1]
            part = session.session_id, tested[0] // SPAN
            self.versions.count(drafting.name, drafting.number, part, is_accepted)
        part = session.session_id, len(session.tokens) // SPAN
        drafting.number, drafting.version = self.versions.choose(drafting.name, part)

    def _expect(self, session: SessionCopy, proposal: Proposal) -> Proposal:
        """Note a session's proposal, whose first token the next committed one accepts or not; name it."""
        drafting = self._sessions[session.session_id]
        drafting.tested = (len(session.tokens), proposal.token_ids[0]) if proposal else None
        return replace(proposal, version=drafting.number) if drafting.number else proposal
