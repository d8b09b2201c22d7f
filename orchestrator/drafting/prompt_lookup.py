"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the latest tokens.

This drafter is always available: it needs no model and no worker, and takes a few microseconds. Its proposals
are functions of the committed tokens alone, so each token's distribution is a point mass, and every
verification method stays exact: where the target samples, its token matches or not; rejection accepts y with
probability p(y), and otherwise draws from p without y.

Reference: prompt lookup decoding (Saxena, 2023), arXiv 2304.04487 ("Inference with Reference").
"""

from __future__ import annotations

from gammaray.errors import UnavailableError
from gammaray.types import DrafterKind, Proposal, SparseDistribution
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Shape

__all__ = ["NgramDrafter"]

LONGEST, SHORTEST = 4, 2
"""N-gram lengths that are looked up: the longest match wins; single tokens are no evidence."""

MAX_INDEXED = 16_384
"""Latest tokens that are indexed at the start: building the index blocks the event loop."""


class NgramDrafter:
    """Proposes chains for one session; implements the cycle's Drafter."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    async def propose(self, session: Session, shape: Shape) -> Proposal:
        """Return at most `shape.depth` tokens that followed an earlier occurrence of the latest tokens.

        Raises:
            UnavailableError: The latest tokens have not occurred before.
        """
        proposal = self.look_up(session, shape.depth)
        if not proposal:
            raise UnavailableError("the latest tokens never stood before")
        return proposal

    def look_up(self, session: Session, depth: int) -> Proposal:
        """Return what followed an earlier occurrence of the latest tokens, empty if there is none."""
        tokens = session.token_ids
        self._index(tokens)
        for length in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            end = self._ends.get(tuple(tokens[-length:]))
            if end is not None:
                return _chain(tuple(tokens[end : end + depth]), session.needs_draft_distributions)
        return Proposal(drafter=DrafterKind.NGRAM)

    def _index(self, tokens: list[int]) -> None:
        """Index the latest end of each n-gram, except those at the end of the sequence."""
        first = max(self._num_indexed, SHORTEST, len(tokens) - MAX_INDEXED)
        for end in range(first, len(tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = end
        self._num_indexed = len(tokens)


def _chain(token_ids: tuple[int, ...], needs_laws: bool) -> Proposal:
    laws = tuple(SparseDistribution((token_id,), (2,), 1) for token_id in token_ids) if needs_laws else None
    return Proposal(token_ids, draft_distributions=laws, drafter=DrafterKind.NGRAM)
