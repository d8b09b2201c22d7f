"""What cycles cost, as the orchestrator sees it: waits, with network and queueing in them.

One model per replica, shared by its sessions, so that a new session starts warm.
"""

from __future__ import annotations

from gammaray.metrics import AcceptanceEstimator
from orchestrator.cycle import Cycle

__all__ = ["CostModel", "WaitModel"]

DECAY = 0.995
"""Weight that an observation keeps per later one: some 200 count."""

OUTLIER = 3.0
"""A wait counts as at most this many mean deviations off what was expected: a hiccup is no trend."""

DEVIATION_RATE, DEVIATION_GROWTH = 0.1, 8.0
"""The mean deviation follows its observations, each of which counts as at most this many times itself: when
all waits are off, it grows by 70 % with each one and the trend gets through."""

FIRST_DEVIATION = 0.3
"""Mean deviation assumed at first, as a share of the first wait."""

LINE_STRENGTH = 4.0
"""Observations that the line is worth beside the mean at one token count."""

SLOPE_STRENGTH = 2.0
"""Spread of token counts (weighted sum of squares) that the prior slope is worth."""


PLAIN_PERIOD = 100
"""Cycles of all sessions between two measurements of plain decoding, once there are some."""

FIRST_PLAIN_PERIOD = 8
"""Cycles before the first one; the period then doubles."""


class WaitModel:
    """Seconds of a wait as a function of a token count: a mean per count, shrunk towards a line through all.

    Args:
        is_proportional: What to assume of the slope before different counts were seen: proportional to the
            count (drafting, one forward per token) or flat (verifying, one forward for all).
    """

    def __init__(self, *, is_proportional: bool) -> None:
        self._is_proportional = is_proportional
        self._weights: dict[int, float] = {}
        self._means: dict[int, float] = {}
        # Decayed sums over the observations of 1, count, seconds, count^2 and count * seconds.
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._deviation = 0.0

    def observe(self, count: int, seconds: float) -> None:
        """Take note of one wait."""
        seconds = self._tame(count, seconds)
        for known in self._weights:
            self._weights[known] *= DECAY
        weight = self._weights.get(count, 0.0) + 1.0
        mean = self._means.get(count, 0.0)
        self._weights[count] = weight
        self._means[count] = mean + (seconds - mean) / weight
        self._n = self._n * DECAY + 1.0
        self._x = self._x * DECAY + count
        self._y = self._y * DECAY + seconds
        self._xx = self._xx * DECAY + count * count
        self._xy = self._xy * DECAY + count * seconds

    def estimate(self, count: int) -> float | None:
        """Return the expected wait in seconds; None before the first observation."""
        if self._n == 0.0:
            return None
        mean_count, mean_s = self._x / self._n, self._y / self._n
        spread = max(0.0, self._xx - self._x * mean_count)
        rise = self._xy - self._x * mean_s
        prior_slope = mean_s / mean_count if self._is_proportional and mean_count > 0 else 0.0
        slope = max(0.0, (rise + SLOPE_STRENGTH * prior_slope) / (spread + SLOPE_STRENGTH))
        line = max(mean_s + slope * (count - mean_count), 0.0)
        weight = self._weights.get(count, 0.0)
        return (weight * self._means.get(count, 0.0) + LINE_STRENGTH * line) / (weight + LINE_STRENGTH)

    def _tame(self, count: int, seconds: float) -> float:
        """Return the wait, moved towards what was expected where it is far off."""
        expected = self.estimate(count)
        if expected is None:
            self._deviation = FIRST_DEVIATION * seconds
            return seconds
        bound = OUTLIER * self._deviation
        tamed = min(max(seconds, expected - bound), expected + bound)
        off = min(abs(seconds - expected), DEVIATION_GROWTH * self._deviation)
        self._deviation += DEVIATION_RATE * (off - self._deviation)
        return tamed

    def measured(self, count: int) -> float | None:
        """Return the mean wait at exactly this count; None when it was never observed."""
        return self._means.get(count)

    @property
    def num_counts(self) -> int:
        """How many different token counts were observed."""
        return len(self._weights)


class CostModel:
    """Draft wait, verify wait, everything else, and the acceptance that new sessions may expect.

    The first cycle of a session is left out of the waits: it contains the prefill.

    Attributes:
        acceptance: Acceptance over all sessions.
        cycles_since_draft: Cycles since the last one with a proposal.
    """

    def __init__(self) -> None:
        self.acceptance = AcceptanceEstimator(decay=0.999)
        self.cycles_since_draft = 0
        self._cycles_since_plain = 0
        self._num_plain = 0
        self._draft = WaitModel(is_proportional=True)
        self._verify = WaitModel(is_proportional=False)
        self._other = WaitModel(is_proportional=False)

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
        self.acceptance.observe(cycle.num_tested, cycle.num_accepted)
        self.cycles_since_draft += 1
        self._cycles_since_plain += 1
        if cycle.num_drafted > 0:
            self.cycles_since_draft = 0
        if cycle.is_first:
            return
        if cycle.num_drafted > 0:
            self._draft.observe(cycle.num_drafted, cycle.draft_s)
        elif cycle.gamma == 0:
            self._cycles_since_plain = 0
            self._num_plain += 1
        self._verify.observe(cycle.num_drafted, cycle.verify_s)
        self._other.observe(0, cycle.total_s - cycle.draft_s - cycle.verify_s)

    @property
    def is_plain_due(self) -> bool:
        """Whether the cost of plain decoding should be measured again."""
        period: int = min(PLAIN_PERIOD, FIRST_PLAIN_PERIOD * 2 ** min(self._num_plain, 8))
        return self._cycles_since_plain >= period

    def cycle_s(self, gamma: int) -> float | None:
        """Return the expected seconds of a cycle; None while a part of it was never measured."""
        draft = self._draft.estimate(gamma) if gamma > 0 else 0.0
        verify, other = self._verify.estimate(gamma), self._other.estimate(0)
        if draft is None or verify is None or other is None:
            return None
        return draft + verify + other

    @property
    def plain_cycle_s(self) -> float | None:
        """Seconds of a cycle at gamma 0.

        Measured where there was one, else extrapolated from the verify waits at two or more lengths; None
        while neither is there.
        """
        other = self._other.estimate(0)
        measured = self._verify.measured(0)
        if measured is None and self._verify.num_counts >= 2:
            measured = self._verify.estimate(0)
        return None if measured is None or other is None else measured + other
