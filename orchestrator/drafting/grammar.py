"""Tokens that a session's grammar leaves no choice for, and proposals cut to what the grammar allows.

Forced tokens are accepted at any temperature by every verification method, as the target's processed
distribution has all its mass on them. They cost rows of one forward, and no forward of a draft model.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from gammaray.errors import InvalidArgumentError
from gammaray.grammar.matcher import GrammarState
from gammaray.types import DrafterKind, Proposal
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Match

_log = logging.getLogger(__name__)


class GrammarDrafter:
    """Proposes the forced tokens of one session, by its grammar's own state; implements TextDrafter.

    If a proposal exceeds the limits of the grammar, drafting by it ends for the session: nothing is forced
    any more, and proposals are not cut. The target, which has a state of its own, refuses what is impossible.
    """

    kind = DrafterKind.GRAMMAR

    def __init__(self, state: GrammarState) -> None:
        self._state: GrammarState | None = state

    def look_up(self, session: Session, depth: int) -> Match | None:
        """Return the forced tokens after the committed ones; None where the grammar leaves a choice."""
        found: tuple[int, ...] = ()
        try:
            if (state := self._followed(session)) is not None:
                found = tuple(state.forced(depth))
        except InvalidArgumentError as error:
            self._end(session, error)
        return Match(self.kind, found, session.num_emitted, (1.0,) * len(found)) if found else None

    def completed(self, session: Session, match: Match, depth: int) -> Match | None:
        """Return a match up to its first impossible token, with the tokens that are forced after that."""
        try:
            state = self._followed(session)
            if state is None:
                return match
            possible = match.token_ids[: state.count_possible(match.token_ids)]
            if not possible:
                return None
            forced = tuple(state.forced(depth - len(possible), possible))
        except InvalidArgumentError as error:
            self._end(session, error)
            return match
        probabilities = match.probabilities[: len(possible)] + (1.0,) * len(forced)
        return replace(match, token_ids=possible + forced, probabilities=probabilities)

    def cut(self, session: Session, proposal: Proposal) -> Proposal:
        """Return a chain without what follows its first impossible token; a tree as it is.

        That token is dropped as well, unless it came with a distribution: it was sampled, and to drop it
        because of its value would bias the token in its place.
        """
        if proposal.parents is not None:
            return proposal
        try:
            state = self._followed(session)
            count = len(proposal) if state is None else state.count_possible(proposal.token_ids)
        except InvalidArgumentError as error:
            self._end(session, error)
            return proposal
        kept = count if proposal.draft_distributions is None else min(count + 1, len(proposal))
        return proposal.path(range(kept))

    def _followed(self, session: Session) -> GrammarState | None:
        """Return the state after the committed tokens; None after a failure."""
        if self._state is not None:
            self._state.extend(session.token_ids[len(session.prompt) + len(self._state) :])
        return self._state

    def _end(self, session: Session, error: InvalidArgumentError) -> None:
        self._state = None
        _log.warning("session %s continues without drafting by its grammar: %s", session.session_id, error)
