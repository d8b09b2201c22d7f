"""Compares the acceptance of a candidate with that of the stable version while both serve.

The evidence may be looked at after every proposal: the difference of the two rates has an asymptotic
confidence sequence, Robbins' normal mixture with the estimated variance (arXiv 2103.06476). Proposals of one
session are alike, as some texts and temperatures are easier than others. The variance is therefore that
between parts of sessions: of a ratio estimated from clusters.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

ERROR = 0.01
"""Probability with which the true difference ever leaves the interval, on each side."""

MIN_TESTED, MIN_PARTS = 30, 3
"""Proposals, and parts of sessions, of each side before the first decision."""

ENOUGH = 300
"""Proposals of the candidate after which it is promoted if its rate is the higher one."""

MOST = 3000
"""Proposals of the candidate after which it is rolled back if nothing was decided."""

_TIGHTEST = 25.0
"""Inverse variance around which the interval is tightest: about 60 proposals of each side."""


class Decision(Enum):
    """What becomes of a candidate."""

    WAIT = "wait"
    PROMOTE = "promote"
    ROLL_BACK = "roll back"


class _Side(NamedTuple):
    """What one version reached: parts of sessions, proposals, accepted first tokens; the rate's variance."""

    parts: int
    tested: int
    accepted: int
    variance: float

    @property
    def rate(self) -> float:
        return (self.accepted + 1) / (self.tested + 2)  # never 0 or 1, where the variance would be 0


class Canary:
    """Counts proposals of the two sides, and how many of their first tokens were accepted."""

    def __init__(self) -> None:
        self._parts: tuple[dict[tuple[str, int], list[int]], ...] = ({}, {})

    def add(self, part: tuple[str, int], is_accepted: bool, *, is_candidate: bool) -> None:
        """Count a proposal of a part of a session, all of which one version drafts."""
        counts = self._parts[is_candidate].setdefault(part, [0, 0])
        counts[0] += 1
        counts[1] += is_accepted

    def _side(self, is_candidate: bool) -> _Side:
        parts = list(self._parts[is_candidate].values())  # another thread may add some
        tested, accepted = (sum(part[at] for part in parts) for at in (0, 1))
        side = _Side(len(parts), tested, accepted, 1.0)
        if len(parts) < MIN_PARTS:
            return side
        rate = side.rate
        alone = rate * (1 - rate) / tested
        spread = sum((accepted - rate * tested) ** 2 for tested, accepted in parts)
        return side._replace(variance=max(alone, spread / tested**2 * len(parts) / (len(parts) - 1)))

    def decide(self) -> Decision:
        """Return what the evidence allows."""
        stable, candidate = self._side(False), self._side(True)
        for side in (stable, candidate):
            if side.tested < MIN_TESTED or side.parts < MIN_PARTS:
                return Decision.WAIT
        difference, information = candidate.rate - stable.rate, 1 / (stable.variance + candidate.variance)
        log_bound = math.log((information + _TIGHTEST) / (_TIGHTEST * ERROR**2))
        radius = math.sqrt((information + _TIGHTEST) * log_bound) / information
        if difference + radius < 0:
            return Decision.ROLL_BACK
        if difference - radius > 0 or (candidate.tested >= ENOUGH and difference > 0):
            return Decision.PROMOTE
        return Decision.ROLL_BACK if candidate.tested >= MOST else Decision.WAIT

    def __str__(self) -> str:
        sides = [f"{side.accepted} of {side.tested}" for side in map(self._side, (True, False))]
        return f"first tokens accepted: {sides[0]}, of the stable version {sides[1]}"
