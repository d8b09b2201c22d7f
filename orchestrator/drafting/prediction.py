"""Predicted outputs: proposes the tokens of a text that the request expects the completion to resemble.

A pointer follows the completion through the prediction. Where the completion deviates, the pointer is lost
until the latest two tokens occur in the prediction again; of several places the one nearest to where the
pointer would be is taken, as edits are mostly local.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from gammaray.types import DrafterKind
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Match

MIN_MATCH = 2
"""Tokens that must match for the pointer to be set again; a single one occurs by chance."""

LONGEST = 64
"""Upper bound of the tokens that are compared where the pointer is set again."""


class PredictionDrafter:
    """Follows the completion of one session through its prediction; implements TextDrafter."""

    kind = DrafterKind.PREDICTION

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = tuple(prediction)
        self._text = _text_of(self._prediction)
        self._num_seen = 0
        self._pointer = 0  # where the next token is expected
        self._length = 0  # tokens before the pointer that match
        self._is_lost = False

    def look_up(self, session: Session, depth: int) -> Match | None:
        """Return the tokens after the pointer; None while it is lost, and at the end of the prediction."""
        start = len(session.prompt)
        for token_id in session.token_ids[start + self._num_seen :]:
            self._follow(token_id)
        self._num_seen = session.num_emitted
        if self._is_lost and session.num_emitted >= MIN_MATCH:
            self._find(session.token_ids[max(start, session.num_committed - LONGEST) :])
        found = self._prediction[self._pointer : self._pointer + depth]
        if self._is_lost or not found:
            return None
        return Match(self.kind, found, self._length, (1.0,) * len(found))

    def _follow(self, token_id: int) -> None:
        """Advance by one token of the completion; while lost, by one of the prediction as well."""
        matches = self._prediction[self._pointer : self._pointer + 1] == (token_id,)
        self._is_lost = self._is_lost or not matches
        self._length = 0 if self._is_lost else self._length + 1
        self._pointer += 1

    def _find(self, emitted: Sequence[int]) -> None:
        """Set the pointer after the nearest occurrence of the latest tokens."""
        wanted, near = _text_of(emitted[-MIN_MATCH:]), max(0, self._pointer - MIN_MATCH)
        found = self._text.find(wanted, near), self._text.rfind(wanted, 0, near + MIN_MATCH - 1)
        places = [place for place in found if place >= 0]
        if not places:
            return
        self._pointer, self._is_lost = min(places, key=lambda at: abs(at - near)) + MIN_MATCH, False
        limit = min(self._pointer, len(emitted))
        self._length = MIN_MATCH
        while self._length < limit and (
            self._prediction[self._pointer - self._length - 1] == emitted[-self._length - 1]
        ):
            self._length += 1


def _text_of(token_ids: Sequence[int]) -> str:
    """Return tokens as characters, in which `str` searches; vocabularies are smaller than Unicode."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids).decode("utf-32-le", "surrogatepass")
