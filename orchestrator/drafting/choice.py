"""Chooses the drafter of each cycle and the shape of its proposal.

Tokens that a grammar forces are proposed alone. Else the draft model and the text drafters compete by
expected tokens per second, under the same sample of costs. The choice depends on committed tokens and past
cycles only, so all verification methods stay exact.
"""

from __future__ import annotations

from dataclasses import replace

from gammaray.blocks import Shape
from gammaray.types import DrafterKind
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Cycle
from orchestrator.drafting.session_drafter import SessionDrafter
from orchestrator.drafting.text_gamma import TextGamma
from orchestrator.gamma.adaptive import AdaptiveGamma
from orchestrator.gamma.cost_model import CostModel
from orchestrator.gamma.fixed import FixedGamma, Reason
from orchestrator.workers.drafter import Readiness

__all__ = ["AdaptiveChoice", "FixedChoice"]


class FixedChoice:
    """Always the same gamma; implements GammaController.

    The request's prediction is proposed while the completion follows it, else the draft model proposes, and
    while no draft worker can, the longest match in known text.

    Args:
        session: The session.
        drafter: Its drafters.
        allowed: The drafter that the request allows.
        gamma: Chooses the shape.
    """

    def __init__(
        self, session: Session, drafter: SessionDrafter, allowed: DrafterKind, gamma: FixedGamma
    ) -> None:
        self._session, self._drafter, self._allowed, self._gamma = session, drafter, allowed, gamma

    def next_shape(self) -> Shape:
        """Return the shape of the next cycle's proposal."""
        shape, session = self._gamma.next_shape(), self._session
        if shape.depth == 0:
            return shape
        if forced := self._drafter.num_forced(session):
            depth = min(shape.depth, forced)
            return replace(shape, depth=depth, max_nodes=0, drafter=DrafterKind.GRAMMAR)
        readiness = self._drafter.prepare(session) if self._allowed.is_model else None
        if readiness is Readiness.READY and not self._drafter.has_prediction:
            return shape  # look-ups would not be used
        matches = self._drafter.matches(session)
        if any(match.kind is DrafterKind.PREDICTION for match in matches):
            return replace(shape, max_nodes=0, drafter=DrafterKind.PREDICTION)
        if readiness is Readiness.READY:
            return shape
        is_fallback = readiness is Readiness.ABSENT
        match = max(matches, key=lambda match: match.length, default=None)
        kind = DrafterKind.NGRAM if match is None else match.kind
        return replace(shape, max_nodes=0, drafter=kind, is_fallback=is_fallback)

    def observe(self, cycle: Cycle) -> None:
        """Learn the costs of a finished cycle for the other sessions."""
        if not _has_fallen_back(cycle):
            self._gamma.observe(cycle)


class AdaptiveChoice:
    """The drafter and shape with the most expected tokens per second; implements GammaController.

    Args:
        session: The session.
        drafter: Its drafters.
        allowed: The drafter that the request allows; MODEL allows the text drafters too.
        model: Chooses the shape of the proposals of the draft model or head.
        text: Chooses among matches.
        costs: Shared by the sessions of this replica.
    """

    def __init__(
        self,
        session: Session,
        drafter: SessionDrafter,
        allowed: DrafterKind,
        model: AdaptiveGamma,
        text: TextGamma,
        costs: CostModel,
    ) -> None:
        self._session, self._drafter, self._allowed = session, drafter, allowed
        self._model, self._text, self._costs = model, text, costs

    def next_shape(self) -> Shape:
        """Return the shape of the next cycle's proposal, which names its drafter."""
        readiness = Readiness.ABSENT
        if self._allowed.is_model:
            readiness = self._drafter.prepare(self._session)
        if forced := self._drafter.num_forced(self._session):
            return Shape(forced, reason=Reason.FORCED.value, drafter=DrafterKind.GRAMMAR)
        shape = self._model.next_shape() if readiness is Readiness.READY else None
        matches = self._drafter.matches(self._session)
        if matches:
            by_text, speed = self._text.best(matches)
            if shape is None or shape.depth == 0 or speed > self._model.speed:
                shape = by_text
        if shape is None:
            shape = Shape(0, drafter=DrafterKind.NGRAM)
        is_fallback = self._allowed.is_model and readiness is Readiness.ABSENT
        return replace(shape, is_fallback=True) if is_fallback else shape

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle; one whose draft worker failed is evidence for no drafter."""
        if _has_fallen_back(cycle):
            return
        if cycle.shape.drafter.is_model:
            self._model.observe(cycle)
        else:
            if cycle.shape.drafter is not DrafterKind.GRAMMAR:
                self._text.observe(cycle)
            self._costs.observe(cycle, was_plain=False)
            self._model.skip()


def _has_fallen_back(cycle: Cycle) -> bool:
    """Whether the chosen drafter failed in this cycle."""
    return cycle.draft_failed or (cycle.is_fallback and not cycle.shape.is_fallback)
