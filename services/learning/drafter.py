"""Drafts with the versions of a head that are trained while it serves.

A session that changes its version gives it the newest hidden states, so that it proposes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gammaray.blocks import Shape
from gammaray.types import Proposal
from services.learning.records import Buffer
from services.learning.versions import Drafting, Versions
from services.scheduling.sessions import SessionCopy
from services.speculation.head_drafter import HeadDrafter

MAX_KEPT = 32
"""Sessions at a time whose states are buffered: for SmolLM2 3 MB each, for a target of 8B 20 MB."""

Request = tuple[SessionCopy, Shape, int]


@dataclass
class _Session(Drafting[HeadDrafter]):
    """A session that drafts here.

    Attributes:
        is_kept: Whether its newest states are buffered.
    """

    is_kept: bool = False
    buffer: Buffer = field(default_factory=Buffer)
    copy: SessionCopy | None = None


class LearningDrafter:
    """Has the methods of `LocalDrafter`, over several versions of a head.

    Args:
        taps: As of `LocalDrafter`.
        versions: The versions.
    """

    def __init__(self, taps: Sequence[int], versions: Versions[HeadDrafter]) -> None:
        self.taps, self.versions = taps, versions
        self._sessions: dict[str, _Session] = {}
        self._num_kept = 0
        self._dtype = torch.float32  # of the target's states; buffers keep fewer bits

    def close(self) -> None:
        """End what runs beside the sessions."""
        self.versions.close()

    def take(self, session_id: str, start: int, states: Tensor) -> None:
        """Keep the hidden states of committed positions, see `LocalDrafter.take`."""
        session, self._dtype = self._session(session_id, start + len(states)), states.dtype
        if session.is_kept:
            session.buffer.take(start, states)
        session.version.take(session_id, start, states)

    def drop(self, session_id: str) -> None:
        """Forget a session; its stream is recorded if its tenant agreed."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        session.version.drop(session_id)
        self._num_kept -= session.is_kept
        if session.copy is not None and session.name is not None and session.buffer.parts:
            self.versions.record(session.copy, session.buffer)

    def forget(self, session_id: str) -> None:
        """Delete what was recorded of a session, and record nothing when it ends."""
        if (session := self._sessions.get(session_id)) is not None:
            session.name = None
        self.versions.forget(session_id)

    def draft(self, requests: Sequence[Request]) -> list[Proposal]:
        """Return a proposal for each session, see `LocalDrafter.draft`; each version drafts for its own."""
        found: dict[int, Proposal] = {}
        for drafter, places in self._by_drafter(requests):
            proposals = drafter.draft([requests[place] for place in places])
            found |= dict(zip(places, proposals, strict=True))
        for place, (copy, _, _) in enumerate(requests):
            session = self._sessions[copy.session_id]
            session.expect(copy, found[place])
            if session.number:
                found[place] = replace(found[place], version=session.number)
        return [found[place] for place in range(len(requests))]

    def prepare(self, requests: Sequence[Request], stop: c_int32) -> None:
        """Draft ahead, see `LocalDrafter.prepare`."""
        for drafter, places in self._by_drafter(requests):
            drafter.prepare([requests[place] for place in places], stop)

    def _by_drafter(self, requests: Sequence[Request]) -> list[tuple[HeadDrafter, list[int]]]:
        places: dict[HeadDrafter, list[int]] = {}
        for place, (copy, _, _) in enumerate(requests):
            session = self._session(copy.session_id, len(copy.tokens))
            session.copy = copy
            before = session.version
            if self.versions.follow(session, copy):
                before.drop(copy.session_id)
                if session.buffer.parts:
                    start, states = session.buffer.states()
                    session.version.take(copy.session_id, start, states.to(self._dtype))
            places.setdefault(session.version, []).append(place)
        return list(places.items())

    def _session(self, session_id: str, num_tokens: int) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            name = self.versions.name_of(session_id)
            is_kept = name is not None and self._num_kept < MAX_KEPT
            self._num_kept += is_kept
            version = self.versions.choose(name, session_id, num_tokens)
            session = self._sessions[session_id] = _Session(name, *version, is_kept=is_kept)
        return session
