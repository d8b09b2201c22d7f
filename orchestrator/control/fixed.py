"""The controller that always chooses the same gamma, and the reasons that controllers give."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from gammaray.blocks import Shape
from gammaray.types import DrafterKind
from orchestrator.control.costs import CostModel
from orchestrator.cycle.types import Candidates, Cycle


class Reason(str, Enum):
    FIXED = "fixed"
    OFF = "off"
    NO_DRAFTER = "no drafter"
    FIRST = "costs unknown"
    BEST = "best"
    FORCED = "forced by the grammar"


class FixedGamma:
    """Always chooses the same gamma; its cycles teach the costs, too.

    The tokens that a grammar forces are proposed alone, the request's prediction while the completion follows
    it, else the draft model proposes, and while it cannot, the longest match in known text. Above gamma
    `max_nodes` is for trees of the draft model.
    """

    def __init__(
        self, gamma: int, costs: CostModel, max_nodes: int = 0, reason: Reason | None = None
    ) -> None:
        reason = reason or (Reason.FIXED if gamma else Reason.OFF)
        self._shape = Shape(gamma, max_nodes, reason=reason.value)
        self._costs = costs
        self._was_plain = True

    def next_shape(self, candidates: Candidates) -> Shape:
        shape, matches = self._shape, candidates.matches
        if shape.depth == 0:
            return shape
        if candidates.num_forced:
            depth = min(shape.depth, candidates.num_forced)
            return replace(shape, depth=depth, max_nodes=0, drafter=DrafterKind.GRAMMAR)
        if any(match.kind is DrafterKind.PREDICTION for match in matches):
            return replace(shape, max_nodes=0, drafter=DrafterKind.PREDICTION)
        if candidates.models:
            return replace(shape, drafter=candidates.models[0])
        longest = max(matches, key=lambda match: match.length, default=None)
        kind = DrafterKind.SUFFIX if longest is None else longest.kind
        return replace(shape, max_nodes=0, drafter=kind, is_fallback=candidates.is_fallback)

    def observe(self, cycle: Cycle) -> None:
        if not cycle.has_fallen_back:
            self._costs.observe(cycle, was_plain=self._was_plain)
            self._was_plain = cycle.num_drafted == 0
