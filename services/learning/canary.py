"""Compares the acceptance of a candidate with that of the stable version while both serve.

The evidence may be looked at after every proposal: the difference of the two rates has an asymptotic
confidence sequence, Robbins' normal mixture with the estimated variance (arXiv 2103.06476).
"""

from __future__ import annotations

import math
from enum import Enum

ERROR = 0.01
"""Probability with which the true difference ever leaves the interval, on each side."""

MIN_TESTED = 30
"""Proposals of each side before the first decision."""

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


class Canary:
    """Counts proposals of the two sides, and how many of their first tokens were accepted."""

    def __init__(self) -> None:
        self._tested, self._accepted = [0, 0], [0, 0]

    def add(self, is_accepted: bool, *, is_candidate: bool) -> None:
        """Count a proposal."""
        self._tested[is_candidate] += 1
        self._accepted[is_candidate] += is_accepted

    def difference(self) -> tuple[float, float]:
        """Return the candidate's rate minus the stable version's, and half the width of its interval."""
        rates, variance = [], 0.0
        for tested, accepted in zip(self._tested, self._accepted, strict=True):
            rate = (accepted + 1) / (tested + 2)  # never 0 or 1, where the variance would be 0
            rates.append(rate)
            variance += rate * (1 - rate) / max(1, tested)
        information = 1 / variance
        log_bound = math.log((information + _TIGHTEST) / (_TIGHTEST * ERROR**2))
        return rates[1] - rates[0], math.sqrt((information + _TIGHTEST) * log_bound) / information

    def decide(self) -> Decision:
        """Return what the evidence allows."""
        if min(self._tested) < MIN_TESTED:
            return Decision.WAIT
        difference, radius = self.difference()
        if difference + radius < 0:
            return Decision.ROLL_BACK
        if difference - radius > 0 or (self._tested[1] >= ENOUGH and difference > 0):
            return Decision.PROMOTE
        return Decision.ROLL_BACK if self._tested[1] >= MOST else Decision.WAIT

    def __str__(self) -> str:
        sides = [f"{a} of {t}" for a, t in zip(self._accepted, self._tested, strict=True)]
        return f"first tokens accepted: {sides[1]}, of the stable version {sides[0]}"
