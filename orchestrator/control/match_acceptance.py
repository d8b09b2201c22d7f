"""Acceptance of matches, by what they have in common.

A match of sixteen tokens is continued as before far more often than one of two, and both more often where the
target's likeliest token is emitted than where one is drawn.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from gammaray.maths.acceptance import AcceptanceEstimator
from gammaray.types import DrafterKind
from orchestrator.control.costs import FLEET_DECAY, RATE, STRENGTH, MatchClass
from orchestrator.cycle.types import Match

LENGTHS = (1, 2, 3, 4, 8, 16, 32)
"""Lower bounds of the match lengths that share an acceptance: doubling, except for short matches."""

PRIORS = {1: 0.2, 2: 0.5}
"""Acceptance after short matches before any proposal, by length, about as on SmolLM2's greedy text
(docs/lab.md). A prediction has no such prior: its first tokens are as likely as its others."""

PRIOR = 0.7
"""Acceptance of other proposals before any."""

TEMPERATURES = (0.0, 0.5)
"""Upper bounds of the temperatures that share an acceptance; higher ones share the last class."""


class MatchAcceptance:
    """Acceptance of a session's matches by class, shrunk towards that of the replica."""

    def __init__(self, of_replica: dict[MatchClass, AcceptanceEstimator], temperature: float) -> None:
        self._of_replica = of_replica
        self._temperature = bisect.bisect_left(TEMPERATURES, temperature)
        self._own: dict[MatchClass, AcceptanceEstimator] = {}

    def of(self, match: Match) -> AcceptanceEstimator:
        """Return the acceptance of matches like this one."""
        key = self._class_of(match)
        if key not in self._own:
            self._own[key] = AcceptanceEstimator(1.0 - RATE, prior_strength=STRENGTH, fleet=self._fleet(key))
        return self._own[key]

    def observe(self, match: Match, emitted: Sequence[int]) -> None:
        """Count what a cycle emitted as a test of a match, whatever was proposed: the text is the same."""
        pairs = list(zip(match.token_ids, emitted, strict=False))
        accepted = next((depth for depth, (one, other) in enumerate(pairs) if one != other), len(pairs))
        tested = min(accepted + 1, len(pairs))
        self.of(match).observe(tested, accepted)
        self._fleet(self._class_of(match)).observe(tested, accepted)

    def _fleet(self, key: MatchClass) -> AcceptanceEstimator:
        if key not in self._of_replica:
            kind, length, _ = key
            prior = PRIOR if kind is DrafterKind.PREDICTION else PRIORS.get(length, PRIOR)
            self._of_replica[key] = AcceptanceEstimator(FLEET_DECAY, prior_alpha=prior)
        return self._of_replica[key]

    def _class_of(self, match: Match) -> MatchClass:
        return match.kind, bisect.bisect_right(LENGTHS, match.length), self._temperature
