"""Suffix decoding: proposes what followed the latest tokens in the session itself or in past outputs."""

from __future__ import annotations

from gammaray.types import DrafterKind
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Match
from orchestrator.drafting.corpus import Corpus
from orchestrator.drafting.suffix_index import SuffixIndex

MAX_INDEXED = 32_768
"""Latest tokens that are indexed at the start: building the index blocks the event loop."""


class SuffixDrafter:
    """Looks the latest tokens up in their session and in a corpus, and proposes the more promising chain."""

    kind = DrafterKind.SUFFIX

    def __init__(self, corpus: Corpus | None = None) -> None:
        self._corpus, self._index = corpus, SuffixIndex()
        self._num_seen = 0

    def look_up(self, session: Session, depth: int) -> Match | None:
        tokens = session.token_ids
        self._index.extend(tokens[max(self._num_seen, len(tokens) - MAX_INDEXED) :])
        self._num_seen = len(tokens)
        context = self._index.context
        own = self._index.look_up(context, depth)
        past = self._corpus.look_up(session, depth, context) if self._corpus is not None else None
        found = [match for match in (own, past) if match is not None]
        return max(found, key=lambda match: (match.expected_tokens, match.length), default=None)
