"""Calibrates the draft's confidence per session, from observed acceptance.

The draft estimates from its own logits how likely its token is accepted. The estimate is too low on text that
it models well, too high on other text, and the error multiplies over several tokens: of the demo pair's
greedy chains of four, estimated at 0.60 on prose and 0.79 on repetitive code, 0.68 and 0.75 are accepted
whole. The choice of what to prepare ahead and the nodes of trees depend on these estimates.

Each confidence is therefore raised to a power. The power's logarithm is learned by maximum likelihood from
each tested token: a step along the score, divided by the information so far (an online Newton method).
"""

from __future__ import annotations

import math

MEMORY, COMMON_MEMORY = 48.0, 512.0
"""Number of recent proposals that count, for one session and for all sessions of the worker."""

PRIOR = 2.0
"""Information of the prior: that of five tested tokens with confidence 0.6."""

MAX_STEP = 0.5
"""Bound of the change of the logarithm by one proposal."""

LEAST, MOST = 0.1, 3.0
"""Bounds of the power."""

MIN_CONFIDENCE, MAX_CONFIDENCE = 0.01, 1.0 - 1e-6
"""Confidences are clamped to these, so that one token of confidence near 0 cannot outweigh all others."""


class Calibration:
    """The power of one session, regularised towards that of all sessions of the worker.

    Args:
        common: Calibration of all sessions, updated by this one, too; None if this is the common one.

    Attributes:
        power: Exponent to apply to confidences.
    """

    def __init__(self, common: Calibration | None = None) -> None:
        self._common = common
        self._fading = 1.0 - 1.0 / (COMMON_MEMORY if common is None else MEMORY)
        self._shift, self._information = 0.0, PRIOR
        self.power = self._estimate()

    def observe(self, confidences: list[float], *, is_rejected: bool) -> None:
        """Note the confidences of a proposal's tested tokens, and whether the last one was rejected."""
        if self._common is not None:
            self._common.observe(confidences, is_rejected=is_rejected)
        power, score, information = self._estimate(), 0.0, 0.0
        for number, confidence in enumerate(confidences, 1):
            # Accepted with probability exp(-surprise); both terms are derivatives by the power's logarithm.
            surprise = -power * math.log(min(max(confidence, MIN_CONFIDENCE), MAX_CONFIDENCE))
            odds = 1.0 / math.expm1(surprise)
            score += surprise * odds if is_rejected and number == len(confidences) else -surprise
            information += surprise * surprise * odds
        self._information = PRIOR + self._fading * (self._information - PRIOR) + information
        pull = (1.0 - self._fading) * PRIOR * self._shift
        step = min(max((score - pull) / self._information, -MAX_STEP), MAX_STEP)
        # Bounded here too: a shift beyond the bounds would have to be unlearned before the power changes.
        known = self._known
        self._shift = min(max(self._shift + step, math.log(LEAST / known)), math.log(MOST / known))
        self.power = self._estimate()

    @property
    def _known(self) -> float:
        return 1.0 if self._common is None else self._common._estimate()

    def _estimate(self) -> float:
        return min(max(self._known * math.exp(self._shift), LEAST), MOST)


def scales(confidence: float, power: float) -> tuple[float, float]:
    """Return a power's factors on the probability of the draft's own token, `confidence`, and of others."""
    if confidence <= 0.0:
        return 1.0, 1.0
    if confidence >= MAX_CONFIDENCE:
        return 1.0, power
    sure = confidence ** (power - 1.0)
    return sure, (1.0 - sure * confidence) / (1.0 - confidence)
