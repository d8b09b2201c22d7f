"""Tokens that a session's grammar leaves no choice for, and proposals cut to what the grammar allows.

Forced tokens are accepted at any temperature by every verification method, as the target's processed
distribution has all its mass on them. They cost rows of one forward, and no forward of a draft model.
"""

from __future__ import annotations

from dataclasses import replace

from gammaray.grammar.matcher import GrammarState
from gammaray.types import DrafterKind, Proposal
from orchestrator.cycle.session import Session
from orchestrator.drafting.matches import Match

__all__ = ["GrammarDrafter"]


class GrammarDrafter:
    """Proposes the forced tokens of one session; implements TextDrafter.

    Args:
        state: The grammar before the first token of the completion.
    """

    kind = DrafterKind.GRAMMAR

    def __init__(self, state: GrammarState) -> None:
        self._state = state

    def look_up(self, session: Session, depth: int) -> Match | None:
        """Return the forced tokens after the committed ones; None where the grammar leaves a choice."""
        self._follow(session)
        found = tuple(self._state.forced(depth))
        return Match(self.kind, found, session.num_emitted, (1.0,) * len(found)) if found else None

    def completed(self, session: Session, match: Match, depth: int) -> Match | None:
        """Return a match up to its first impossible token, with the tokens that are forced after that."""
        self._follow(session)
        possible = match.token_ids[: self._state.count_possible(match.token_ids)]
        if not possible:
            return None
        forced = tuple(self._state.forced_after(possible, depth - len(possible)))
        probabilities = match.probabilities[: len(possible)] + (1.0,) * len(forced)
        return replace(match, token_ids=possible + forced, probabilities=probabilities)

    def cut(self, session: Session, proposal: Proposal) -> Proposal:
        """Return a chain without what follows its first impossible token; a tree as it is.

        That token is dropped as well, unless it came with a distribution: it was sampled, and to drop it
        because of its value would bias the token in its place.
        """
        if proposal.parents is not None:
            return proposal
        self._follow(session)
        count, shipped = self._state.count_possible(proposal.token_ids), proposal.draft_distributions
        if shipped is None:
            return replace(proposal, token_ids=proposal.token_ids[:count])
        return replace(
            proposal, token_ids=proposal.token_ids[: count + 1], draft_distributions=shipped[: count + 1]
        )

    def _follow(self, session: Session) -> None:
        self._state.extend(session.token_ids[len(session.prompt) + len(self._state) :])
