"""What drafters without a model have in common: they look the latest tokens up in text that is known.

Their proposals are functions of tokens that are known before the cycle, never of the noise of a future token.
(Past outputs of the same seed depend on it, see `orchestrator.drafting.factory.Drafting`.)
Each token's distribution is a point mass, so every verification method stays exact: where the target samples,
its token matches or not; rejection accepts y with probability p(y), and otherwise draws from p without y.
"""

from __future__ import annotations

from typing import Protocol

from gammaray.types import DrafterKind, Proposal, SparseDistribution
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Match


class TextDrafter(Protocol):
    """Finds continuations in known text. A look-up runs on the event loop: it takes microseconds."""

    kind: DrafterKind

    def look_up(self, session: Session, depth: int) -> Match | None:
        """Return a continuation of at most `depth` tokens; None if nothing is found.

        One drafter serves one session: the session's tokens are those of the last call with more appended.
        """


def to_proposal(match: Match | None, session: Session, depth: int) -> Proposal:
    """Return at most `depth` tokens of a match, with the distributions that the verification needs."""
    if match is None:
        return Proposal()
    token_ids, distributions = match.token_ids[:depth], None
    if session.needs_draft_distributions:
        distributions = tuple(SparseDistribution((token_id,), (2,), 1) for token_id in token_ids)
    return Proposal(token_ids, draft_distributions=distributions, drafter=match.kind)
