"""Drafts with a head, from the hidden states of the forwards that the target runs anyway.

The states of committed positions are kept as features until the head is fed the tokens after them. They are a
cache: where features are missing, as behind a shared prefix or after an eviction, the head starts later and
does not attend to the tokens before. Without the feature of the last position but one there is no proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gammaray.blocks import Shape
from services.engine.core.batch import SequenceInput
from services.engine.core.errors import CacheFullError
from services.heads.runner import HeadEngine
from services.scheduling.sessions import SessionCopy
from services.speculation.local_drafter import CHUNK, Drafting, LocalDrafter
from services.speculation.session import Speculation

MAX_FEATURES = 4096
"""Features of one session that wait for the head at most; the oldest are dropped."""


@dataclass(slots=True)
class _HeldFeatures:
    """The features of one session that the head has not read.

    Attributes:
        start: Position of the first one.
        rows: [positions, width].
        fed: How many of the session's tokens the head was fed with features.
        lowest: The first position at which tokens may have changed since.
        speculation: The session's tree.
        is_opened: Whether the tree was begun with the last of these features.
    """

    start: int
    rows: Tensor
    fed: int = 0
    lowest: int = 0
    speculation: Speculation | None = None
    is_opened: bool = False

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
        engine: Runs the head.
        window: Features of one session that wait for the head at most; the oldest are dropped. A head that
            begins after a long prompt, or after that many tokens of other drafters, reads no more than these.
    """

    def __init__(self, engine: HeadEngine, window: int = MAX_FEATURES) -> None:
        super().__init__(engine)
        self._head, self._window = engine, window
        self.taps = engine.target_taps
        self._sessions: dict[str, _HeldFeatures] = {}

    def _take(self, session_id: str, start: int, states: Tensor) -> None:
        rows = self._head.fuse(states)
        held = self._sessions.get(session_id)
        if held is None:
            self._sessions[session_id] = _HeldFeatures(
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

    def _forget(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    def _begin(self, session: SessionCopy, shape: Shape, num_valid: int) -> Drafting | None:
        """Make the head's cache end before the tokens whose features are at hand, or use what is prepared."""
        held = self._sessions.get(session.session_id)
        if held is None:
            return None
        held.truncate(min(num_valid, len(session.tokens) - 1))
        if held.end != len(session.tokens) - 1:
            return None
        speculation = held.speculation
        if speculation is None or speculation.session is not session:
            speculation = held.speculation = self._speculate(session)
        if held.is_opened and speculation.is_at_end(self.engine, shape.depth):
            return self._read(speculation, shape)
        if not self._has_start(held, session):
            return None
        speculation.note_outcome()
        speculation.begin()
        held.is_opened = True
        return self._read(speculation, shape)

    def _has_start(self, held: _HeldFeatures, session: SessionCopy) -> bool:
        """Find out how much of the head's cache is valid; begin a new one if features between are missing."""
        session_id, tokens = session.session_id, session.tokens
        fed = self._num_fed(held, session)
        if fed <= held.start:
            try:
                self.engine.skip(session_id, tokens[: held.start + 1])
            except CacheFullError:
                return False
            fed = held.start + 1
        held.fed, held.lowest = fed, len(tokens)
        return fed < len(tokens)

    def _num_fed(self, held: _HeldFeatures, session: SessionCopy) -> int:
        """Return how many of the session's tokens are in the head's cache."""
        tokens, cached = session.tokens, self.engine.tokens(session.session_id)
        fed = min(held.fed, len(cached), len(tokens) - 1)
        for position in range(min(held.lowest, fed), fed):
            if cached[position] != tokens[position]:
                return position
        return fed

    def _feed_committed(self, drafting: Sequence[Drafting]) -> None:
        """Feed the committed tokens with their features, in chunks, and open the roots."""
        waiting = list(drafting)
        first = {one: self._sessions[one.session.session_id].fed for one in drafting}
        while waiting:
            feeds, done = [], []
            for one in waiting:
                held, session = self._sessions[one.session.session_id], one.session
                end = min(len(session.tokens), held.fed + CHUNK)
                features = held.rows[held.fed - 1 - held.start : end - 1 - held.start]
                is_last = end == len(session.tokens)
                feeds.append(
                    SequenceInput(
                        session.session_id,
                        held.fed,
                        session.tokens[held.fed : end],
                        int(is_last),
                        features=features,
                    )
                )
                held.fed = end
                if is_last:
                    done.append(one)
            logits = self.engine.step(feeds)
            for one, feed, rows in zip(waiting, feeds, logits, strict=True):
                if feed.num_logits:
                    one.speculation.open(self.engine, [one.speculation.tree.root], rows)
                    # Those of the former proposal's root stay, in case that block is repeated.
                    self._sessions[one.session.session_id].drop_before(first[one] - 2)
            waiting = [one for one in waiting if one not in done]
