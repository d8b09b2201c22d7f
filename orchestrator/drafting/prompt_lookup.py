"""Prompt lookup: proposes what followed the latest tokens where they stood before.

The drafter that is always there: no model, no worker, a few microseconds. Its proposals are functions of
the committed tokens alone, so the law of each is a point mass, and every verification method stays exact:
where the target samples, its token matches or not; rejection accepts y with probability p(y), and else draws
from p without y.

Reference: prompt lookup decoding (Saxena, 2023), arXiv 2304.04487 ("Inference with Reference").
"""

from __future__ import annotations

from gammaray.errors import UnavailableError
from gammaray.types import DrafterKind, Proposal, SparseDistribution
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Shape

__all__ = ["NgramDrafter"]

LONGEST, SHORTEST = 4, 2
"""Tokens that must agree: the longest run that was seen before decides, runs of one token say nothing."""

MAX_INDEXED = 16_384
"""Tokens of the past that are looked through at the start: building the index stops the event loop."""


class NgramDrafter:
    """Proposes chains for one session; implements the cycle's Drafter."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    async def propose(self, session: Session, shape: Shape) -> Proposal:
        """Return what followed the latest tokens before, at most `shape.depth` of it.

        Raises:
            UnavailableError: They never stood before.
        """
        proposal = self.look_up(session, shape.depth)
        if not proposal:
            raise UnavailableError("the latest tokens never stood before")
        return proposal

    def look_up(self, session: Session, depth: int) -> Proposal:
        """Return what followed the latest tokens before, empty when they are new."""
        tokens = session.token_ids
        self._index(tokens)
        for length in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            end = self._ends.get(tuple(tokens[-length:]))
            if end is not None:
                return _chain(tuple(tokens[end : end + depth]), session.needs_draft_distributions)
        return Proposal(drafter=DrafterKind.NGRAM)

    def _index(self, tokens: list[int]) -> None:
        """Note where each run of tokens ended last, those excepted that end the sequence now."""
        first = max(self._num_indexed, SHORTEST, len(tokens) - MAX_INDEXED)
        for end in range(first, len(tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = end
        self._num_indexed = len(tokens)


def _chain(token_ids: tuple[int, ...], needs_laws: bool) -> Proposal:
    laws = tuple(SparseDistribution((token_id,), (2,), 1) for token_id in token_ids) if needs_laws else None
    return Proposal(token_ids, draft_distributions=laws, drafter=DrafterKind.NGRAM)
