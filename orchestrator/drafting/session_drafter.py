"""What a session can propose, by a draft worker or head and look-ups in known text, and the choice of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from gammaray.blocks import Shape
from gammaray.errors import GammarayError
from gammaray.types import DrafterKind
from orchestrator.control.adaptive import AdaptiveGamma
from orchestrator.control.either import EitherModel
from orchestrator.control.fixed import FixedGamma
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Candidates, Cycle, Draft, DraftHere, Match
from orchestrator.drafting.grammar import GrammarDrafter
from orchestrator.drafting.head import TargetHead
from orchestrator.drafting.matches import TextDrafter, to_proposal
from orchestrator.workers.drafter import Readiness, RemoteDrafter

_log = logging.getLogger(__name__)


ModelDrafter: TypeAlias = RemoteDrafter | TargetHead
"""Proposes for one session by a model in another process."""

Controller: TypeAlias = AdaptiveGamma | EitherModel | FixedGamma


class SessionDrafter:
    """Finds what could be proposed, and proposes by the drafter that a shape names.

    If the draft model fails, the cycle continues at once with the longest match in known text. Later cycles
    do so while no draft worker is usable, and return to it as soon as one is.

    Args:
        models: Those that may propose, by kind; of a fixed gamma the first one that can does.
        texts: Text drafters, of equally long matches the first one's is preferred.
        max_gamma: Upper bound of the tokens of a match.
        fixed: The request's gamma; None if it is adaptive.
    """

    def __init__(
        self,
        models: Mapping[DrafterKind, ModelDrafter],
        texts: Sequence[TextDrafter],
        max_gamma: int,
        grammar: GrammarDrafter | None = None,
        fixed: int | None = None,
    ) -> None:
        self._models, self._texts, self._max_gamma = models, texts, max_gamma
        self._grammar, self._fixed = grammar, fixed
        self._has_prediction = any(text.kind is DrafterKind.PREDICTION for text in texts)
        self._matches: list[Match] = []
        self._position = -1

    def candidates(self, session: Session) -> Candidates:
        """Return what could be proposed now; what a fixed gamma would not use is left out."""
        if self._fixed == 0:
            return Candidates()
        found = {kind: model.prepare(session) for kind, model in self._models.items()}
        models = [kind for kind, readiness in found.items() if readiness is Readiness.READY]
        if forced := self._num_forced(session):
            return Candidates(num_forced=forced)
        is_alone = self._fixed is not None and bool(models) and not self._has_prediction
        matches = () if is_alone else self.matches(session)
        is_fallback = bool(found) and all(readiness is Readiness.ABSENT for readiness in found.values())
        return Candidates(models, matches, is_fallback=is_fallback)

    def matches(self, session: Session) -> Sequence[Match]:
        """Return what the text drafters find after the committed tokens; at most one match of each."""
        if self._position != session.num_committed:
            self._position = session.num_committed
            grammar, depth = self._grammar, self._max_gamma
            forced = None if grammar is None else grammar.look_up(session, depth)
            found = [text.look_up(session, depth) for text in self._texts]
            self._matches = [match for match in found if match is not None]
            if forced is not None:
                self._matches = [forced]
            elif grammar is not None:
                completed = (grammar.completed(session, match, depth) for match in self._matches)
                self._matches = [match for match in completed if match is not None]
        return self._matches

    def _num_forced(self, session: Session) -> int:
        """Return how many tokens the grammar forces after the committed ones."""
        if self._grammar is None:
            return 0
        found = (match for match in self.matches(session) if match.kind is DrafterKind.GRAMMAR)
        return max((len(match.token_ids) for match in found), default=0)

    async def propose(self, session: Session, shape: Shape) -> Draft:
        """Return the draft of the drafter that `shape` names, empty if it has none.

        The choice depends on past cycles, failures and committed tokens, never on the noise of a future
        token, so all verification methods stay exact.
        """
        if (model := self._models.get(shape.drafter)) is not None:
            try:
                draft = await model.propose(session, shape)
                if self._grammar is None or isinstance(draft, DraftHere):
                    return draft
                return self._grammar.cut(session, draft)
            except GammarayError as error:
                _log.debug("session %s continues without its draft model: %s", session.session_id, error)
            match = max(self.matches(session), key=lambda match: match.length, default=None)
            return replace(to_proposal(match, session, shape.depth), is_fallback=True)
        matches = (match for match in self.matches(session) if match.kind is shape.drafter)
        return to_proposal(next(matches, None), session, shape.depth)

    @property
    def address(self) -> str:
        return next((model.address for model in self._models.values() if model.address), "")

    def prefer(self, session: Session, address: str) -> None:
        for model in self._models.values():
            model.prefer(session, address)

    def release(self, session: Session) -> None:
        for model in self._models.values():
            model.release(session)


class DrafterChoice:
    """A GammaController: asks a session's drafters what they could propose, and its controller which."""

    def __init__(self, session: Session, drafter: SessionDrafter, controller: Controller) -> None:
        self._session, self._drafter, self._controller = session, drafter, controller

    def next_shape(self) -> Shape:
        return self._controller.next_shape(self._drafter.candidates(self._session))

    def observe(self, cycle: Cycle) -> None:
        self._controller.observe(cycle)
