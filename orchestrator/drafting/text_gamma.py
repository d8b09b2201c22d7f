"""Chooses among the matches of text drafters, and how many tokens of one are proposed.

A match costs no forward of a draft model, only the rows that the target verifies. Its expected tokens come
from the acceptance of earlier matches of the same kind, of similar length and at a similar temperature: a
match of sixteen tokens is continued as before far more often than one of two, and both more often where the
target's likeliest token is emitted than where one is drawn.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from gammaray.blocks import Shape
from gammaray.maths.acceptance import AcceptanceEstimator
from gammaray.types import DrafterKind
from orchestrator.cycle.types import Cycle
from orchestrator.drafting.matches import Match
from orchestrator.gamma.adaptive import STRENGTH
from orchestrator.gamma.cost_model import FLEET_DECAY, RATE, CostModel, first_children
from orchestrator.gamma.fixed import Reason

__all__ = ["TextGamma"]

LENGTHS = (1, 2, 3, 4, 8, 16, 32)
"""Lower bounds of the match lengths that share an acceptance: doubling, except for short matches."""

PRIORS = {1: 0.2, 2: 0.5}
"""Acceptance after short matches before any proposal, by length. On SmolLM2's greedy text the token after an
earlier single token agrees in 22 % of the cases, after two in 51 %, after four or more in 88 %
(docs/lab.md). A prediction has no such prior: its first tokens are as likely as its others."""

PRIOR = 0.7
"""Acceptance of other proposals before any."""

TEMPERATURES = (0.0, 0.5)
"""Upper bounds of the temperatures that share an acceptance; higher ones share the last class. On SmolLM2
single tokens are accepted in 22 % of the cases at temperature 0, in 9 % on summaries at temperature 1."""

_Class = tuple[DrafterKind, int, int]
"""Kind of a match, and the classes of its length and of the request's temperature."""


class TextGamma:
    """The text drafters' part of an adaptive gamma.

    Args:
        max_gamma: Upper bound of the tokens that are proposed.
        costs: Shared by the sessions of this replica.
        temperature: Of the request.
    """

    def __init__(self, max_gamma: int, costs: CostModel, temperature: float) -> None:
        self._max_gamma, self._costs = max_gamma, costs
        self._temperature = bisect.bisect_left(TEMPERATURES, temperature)
        self._acceptance: dict[_Class, AcceptanceEstimator] = {}
        self._played: _Class | None = None

    def best(self, matches: Sequence[Match]) -> tuple[Shape, float]:
        """Return the shape with the most expected tokens per second, gamma 0 included, and that speed.

        The speed is 0 while no costs are known; then the longest match is proposed.
        """
        costs = self._costs
        if not costs.is_known:
            longest = max(matches, key=lambda match: match.length)
            self._played = self._class_of(longest)
            return self._shape(longest.kind, len(longest.token_ids), Reason.FIRST), 0.0
        sampled = costs.sample()
        plain_s = costs.plain_s(sampled)
        price = costs.num_waiting * costs.tokens_per_s * sampled[5]
        best, highest = Shape(0, reason=Reason.BEST.value), 1.0 / plain_s
        for match in matches:
            tokens = reached = 1.0
            for depth, probability in enumerate(self._sample_acceptance(match), 1):
                reached *= probability
                tokens += reached
                speed = (tokens - price * depth) / (plain_s + costs.rows_s(sampled, depth))
                if speed > highest:
                    best, highest = self._shape(match.kind, depth, Reason.BEST), speed
                    self._played = self._class_of(match)
        return best, highest

    def observe(self, cycle: Cycle) -> None:
        """Learn the acceptance of a proposed match; the cost model learns from the cycle separately."""
        tested, accepted = first_children(cycle)
        if self._played is not None and tested:
            self._estimator(self._played).observe(tested, accepted)
            self._fleet(self._played).observe(tested, accepted)

    def _estimator(self, key: _Class) -> AcceptanceEstimator:
        if key not in self._acceptance:
            fleet = self._fleet(key)
            self._acceptance[key] = AcceptanceEstimator(1.0 - RATE, prior_strength=STRENGTH, fleet=fleet)
        return self._acceptance[key]

    def _fleet(self, key: _Class) -> AcceptanceEstimator:
        """Return the acceptance over all sessions."""
        known = self._costs.text_acceptance
        if key not in known:
            kind, length, _ = key
            prior = PRIOR if kind is DrafterKind.PREDICTION else PRIORS.get(length, PRIOR)
            known[key] = AcceptanceEstimator(FLEET_DECAY, prior_alpha=prior)
        return known[key]

    def _sample_acceptance(self, match: Match) -> list[float]:
        """Return a posterior sample of the probability of acceptance, by depth."""
        estimator = self._estimator(self._class_of(match))
        draw = self._costs.draws[-1] / math.sqrt(STRENGTH + estimator.num_tested)
        return [
            min(1.0, max(0.0, p + draw * math.sqrt(p * (1.0 - p))))
            for p in estimator.by_depth(min(len(match.token_ids), self._max_gamma))
        ]

    def _shape(self, kind: DrafterKind, depth: int, reason: Reason) -> Shape:
        return Shape(min(depth, self._max_gamma), reason=reason.value, drafter=kind)

    def _class_of(self, match: Match) -> _Class:
        return match.kind, bisect.bisect_right(LENGTHS, match.length), self._temperature
