"""Drafts with a head, from the hidden states of the forwards that the target runs anyway.

The states of committed positions are kept as features until the head is fed the tokens after them. They are a
cache: where features are missing, as after a shared prefix or an eviction, the head starts later and
does not attend to the tokens before. Without the feature of the last position but one there is no proposal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.engine.core.batch import SequenceInput
from services.engine.core.errors import CacheFullError
from services.engine.engine import Engine
from services.scheduling.sessions import SessionCopy
from services.speculation.drafting import PendingProposal
from services.speculation.local_drafter import CHUNK, LocalDrafter
from services.speculation.session import Speculation

MAX_FEATURES = 4096
"""Features of one session that wait for the head at most; the oldest are dropped."""

FUSED_TOGETHER = 32
"""Positions whose states become features in one call, unless the head drafts before. One by one they take
6 % of a plain step of 16 sessions (SmolLM2, AMD EPYC, 2026-11-30)."""


@dataclass(slots=True)
class _UnreadFeatures:
    """The features of one session that the head has not read, and the states of the positions after them."""

    start: int  # position of the first one
    rows: Tensor  # [positions, width]
    states: list[Tensor] = field(default_factory=list)  # each [positions, taps, hidden_size]
    num_states: int = 0  # positions of these
    fed: int = 0  # how many of the session's tokens the head was fed with features
    lowest: int = 0  # the first position at which tokens may have changed since
    is_opened: bool = False  # whether the tree was begun with the last of these features

    def truncate(self, end: int) -> None:
        if end < self.end:
            self.rows = self.rows[: max(0, end - self.start)]
            self.start = min(self.start, end)
            self.is_opened = False
        self.lowest = min(self.lowest, end)

    @property
    def end(self) -> int:
        """Position after the last one."""
        return self.start + len(self.rows) + self.num_states


class HeadDrafter(LocalDrafter):
    """Drafts with one head.

    Args:
        window: Features of one session that wait for the head at most; the oldest are dropped. A head that
            begins after a long prompt, or after that many tokens of other drafters, reads no more than these.
    """

    def __init__(self, engine: Engine, window: int = MAX_FEATURES) -> None:
        super().__init__(engine)
        self._window = window
        self._features: dict[str, _UnreadFeatures] = {}

    def _take(self, session_id: str, start: int, states: Tensor) -> None:
        features = self._features.get(session_id)
        if features is None:
            features = self._features[session_id] = _UnreadFeatures(start, self.engine.fuse(states[:0]))
        features.lowest, features.is_opened = min(features.lowest, start), False
        if start != features.end:
            self._fuse(features)
            num_kept = start - features.start
            if not 0 <= num_kept <= len(features.rows):
                num_kept, features.start = 0, start
            features.rows = features.rows[:num_kept]
        features.states.append(states)
        features.num_states += len(states)
        if features.num_states >= FUSED_TOGETHER:
            self._fuse(features)

    def _fuse(self, features: _UnreadFeatures) -> None:
        """Make features of the states."""
        if features.states:
            rows = torch.cat([features.rows, self.engine.fuse(torch.cat(features.states))])
            features.start += max(0, len(rows) - self._window)
            features.rows, features.states, features.num_states = rows[-self._window :], [], 0

    def drop(self, session_id: str) -> None:
        self._features.pop(session_id, None)
        super().drop(session_id)

    def _follow(self, speculation: Speculation, num_valid: int) -> bool:
        """Make the head's cache end before the tokens whose features are at hand, or use what is prepared."""
        session = speculation.session
        features = self._features.get(session.session_id)
        if features is None:
            return False
        self._fuse(features)
        features.truncate(min(num_valid, len(session.tokens) - 1))
        if features.end != len(session.tokens) - 1:
            return False
        if features.is_opened and speculation.is_at_end:
            return True
        if not self._has_start(features, session):
            return False
        self._note_outcome(speculation)
        speculation.begin()
        features.is_opened = True
        return True

    def _has_start(self, features: _UnreadFeatures, session: SessionCopy) -> bool:
        """Cut the head's cache where it ceases to be valid; begin a new one if features are missing there."""
        session_id, tokens = session.session_id, session.tokens
        fed = self._num_fed(features, session)
        if fed <= features.start:
            try:
                self.engine.skip(session_id, tokens[: features.start + 1])
            except CacheFullError:
                return False
            fed = features.start + 1
        self.engine.truncate(session_id, fed)
        features.fed, features.lowest = fed, len(tokens)
        # Those of the former proposal's root stay, in case that block is repeated.
        num_dropped = max(0, min(fed - 2, features.end - 1) - features.start)
        features.start, features.rows = features.start + num_dropped, features.rows[num_dropped:]
        return fed < len(tokens)

    def _num_fed(self, features: _UnreadFeatures, session: SessionCopy) -> int:
        """Return how many of the session's tokens are in the head's cache."""
        tokens, cached = session.tokens, self.engine.tokens(session.session_id)
        fed = min(features.fed, len(cached), len(tokens) - 1)
        for position in range(min(features.lowest, fed), fed):
            if cached[position] != tokens[position]:
                return position
        return fed

    def _feed(self, pending: PendingProposal) -> SequenceInput:
        if not pending.is_at_root:
            return super()._feed(pending)
        features = self._features[pending.speculation.session.session_id]
        start, end = features.fed, min(pending.num_tokens, features.fed + CHUNK)
        features.fed = end
        rows = features.rows[start - 1 - features.start : end - 1 - features.start]
        return pending.feed(start, end - start, rows)
