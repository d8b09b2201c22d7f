"""Drafts with the versions of a head that are trained while it serves.

A session that changes its version gives it the newest hidden states, so that it proposes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32

from torch import Tensor

from gammaray.blocks import Shape
from gammaray.types import Proposal
from services.learning.learner import Learner
from services.learning.versions import Versions
from services.scheduling.sessions import SessionCopy
from services.speculation.head_drafter import HeadDrafter

Request = tuple[SessionCopy, Shape, int]


class LearningDrafter(Learner[HeadDrafter]):
    """Has the methods of `LocalDrafter`, over several versions of a head."""

    def __init__(self, taps: Sequence[int], versions: Versions[HeadDrafter]) -> None:
        super().__init__(versions)
        self.taps = taps

    def take(self, session_id: str, start: int, states: Tensor) -> None:
        super().take(session_id, start, states)
        self._sessions[session_id].version.take(session_id, start, states)

    def end(self, session: SessionCopy) -> None:
        if (drafting := self._sessions.get(session.session_id)) is not None:
            drafting.version.drop(session.session_id)
        super().end(session)

    def draft(self, requests: Sequence[Request]) -> list[Proposal]:
        """Return a proposal for each session, see `LocalDrafter.draft`; each version drafts for its own."""
        found: dict[int, Proposal] = {}
        for drafter, places in self._by_drafter(requests):
            proposals = drafter.draft([requests[place] for place in places])
            found |= dict(zip(places, proposals, strict=True))
        return [self.expect(copy, found[place]) for place, (copy, _, _) in enumerate(requests)]

    def prepare(self, requests: Sequence[Request], stop: c_int32) -> None:
        """Draft ahead, see `LocalDrafter.prepare`."""
        for drafter, places in self._by_drafter(requests):
            drafter.prepare([requests[place] for place in places], stop)

    def _by_drafter(self, requests: Sequence[Request]) -> list[tuple[HeadDrafter, list[int]]]:
        places: dict[HeadDrafter, list[int]] = {}
        for place, (copy, _, _) in enumerate(requests):
            session = self._session(copy.session_id, len(copy.tokens))
            before = session.version
            if self.versions.follow(session, copy):
                before.drop(copy.session_id)
                if session.buffer is not None and session.buffer.parts:
                    start, states = session.buffer.states()
                    session.version.take(copy.session_id, start, states)
            places.setdefault(session.version, []).append(place)
        return list(places.items())
