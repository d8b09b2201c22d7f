"""Drafts with a head, from the hidden states of the forwards that the target runs anyway.

The states of committed positions are kept as features until the head is fed the tokens after them. They are a
cache: where features are missing, as after a shared prefix or an eviction, the head starts later and
does not attend to the tokens before. Without the feature of the last position but one there is no proposal.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(slots=True)
class _HeldFeatures:
    """The features of one session that the head has not read."""

    start: int  # position of the first one
    rows: Tensor  # [positions, width]
    fed: int = 0  # how many of the session's tokens the head was fed with features
    lowest: int = 0  # the first position at which tokens may have changed since
    is_opened: bool = False  # whether the tree was begun with the last of these features

    def truncate(self, end: int) -> None:
        """Drop the features of the positions from `end` on."""
        if end < self.end:
            self.rows = self.rows[: max(0, end - self.start)]
            self.start = min(self.start, end)
            self.is_opened = False
        self.lowest = min(self.lowest, end)

    def drop_before(self, start: int) -> None:
        """Drop the features of the positions before `start`."""
        dropped = max(0, min(start, self.end - 1) - self.start)
        self.start, self.rows = self.start + dropped, self.rows[dropped:]

    @property
    def end(self) -> int:
        """Position after the last feature."""
        return self.start + len(self.rows)


class HeadDrafter(LocalDrafter):
    """Drafts with one head.

    Args:
        window: Features of one session that wait for the head at most; the oldest are dropped. A head that
            begins after a long prompt, or after that many tokens of other drafters, reads no more than these.
    """

    def __init__(self, engine: Engine, window: int = MAX_FEATURES) -> None:
        super().__init__(engine)
        self._window = window
        self._features: dict[str, _HeldFeatures] = {}

    def _take(self, session_id: str, start: int, states: Tensor) -> None:
        rows = self.engine.fuse(states)
        held = self._features.get(session_id)
        if held is None:
            self._features[session_id] = _HeldFeatures(
                start + max(0, len(rows) - self._window), rows[-self._window :]
            )
            return
        held.lowest, held.is_opened = min(held.lowest, start), False
        if held.start <= start <= held.end:
            rows = torch.cat([held.rows[: start - held.start], rows])
        else:
            held.start = start
        held.start += max(0, len(rows) - self._window)
        held.rows = rows[-self._window :]

    def drop(self, session_id: str) -> None:
        self._features.pop(session_id, None)
        super().drop(session_id)

    def _follow(self, speculation: Speculation, num_valid: int) -> bool:
        """Make the head's cache end before the tokens whose features are at hand, or use what is prepared."""
        session = speculation.session
        held = self._features.get(session.session_id)
        if held is None:
            return False
        held.truncate(min(num_valid, len(session.tokens) - 1))
        if held.end != len(session.tokens) - 1:
            return False
        if held.is_opened and speculation.is_at_end:
            return True
        if not self._has_start(held, session):
            return False
        self._note_outcome(speculation)
        speculation.begin()
        held.is_opened = True
        return True

    def _has_start(self, held: _HeldFeatures, session: SessionCopy) -> bool:
        """Cut the head's cache where it ceases to be valid; begin a new one if features are missing there."""
        session_id, tokens = session.session_id, session.tokens
        fed = self._num_fed(held, session)
        if fed <= held.start:
            try:
                self.engine.skip(session_id, tokens[: held.start + 1])
            except CacheFullError:
                return False
            fed = held.start + 1
        self.engine.truncate(session_id, fed)
        held.fed, held.lowest = fed, len(tokens)
        # Those of the former proposal's root stay, in case that block is repeated.
        held.drop_before(fed - 2)
        return fed < len(tokens)

    def _num_fed(self, held: _HeldFeatures, session: SessionCopy) -> int:
        """Return how many of the session's tokens are in the head's cache."""
        tokens, cached = session.tokens, self.engine.tokens(session.session_id)
        fed = min(held.fed, len(cached), len(tokens) - 1)
        for position in range(min(held.lowest, fed), fed):
            if cached[position] != tokens[position]:
                return position
        return fed

    def _feed(self, pending: PendingProposal) -> SequenceInput:
        """Return the next feed of a proposal, of committed tokens with their features."""
        if not pending.is_at_root:
            return super()._feed(pending)
        held = self._features[pending.speculation.session.session_id]
        start, held.fed = held.fed, min(pending.num_tokens, held.fed + CHUNK)
        features = held.rows[start - 1 - held.start : held.fed - 1 - held.start]
        return pending.feed(start, held.fed - start, features)
