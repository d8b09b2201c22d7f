"""Pauses drafting ahead while it costs more time than it saves."""

from __future__ import annotations

from services.scheduling.metrics import AheadStats

__all__ = ["AHEAD_ROWS", "MIN_LOOKUPS", "MIN_OUTCOME", "PAUSE", "Throttle"]

DECAY, SLOW_DECAY = 0.95, 0.99
"""Decay per lookup: about 20 lookups count for seconds saved and spent, 100 for hits predicted and seen."""

PRIOR_HITS = 3.0
"""Prior pseudo-count of predicted hits that occurred."""

AHEAD_ROWS = 4
"""Upper bound of tokens in one forward of draft-ahead, over all sessions: a block that arrives waits for that
forward to end. Of a parallel draft model at least one block."""

MIN_LOOKUPS = 10
"""The throttle does not pause before this many lookups."""

PAUSE = 64
"""Lookups to skip after draft-ahead cost more than it saved, before it is tried again."""

MIN_OUTCOME = 0.08
"""No proposal is prepared for outcomes less likely than this: one more row costs about half a CPU forward."""


class Throttle:
    """Decayed sums of what draft-ahead saved and cost, over all sessions of a worker."""

    def __init__(self) -> None:
        self.stats = AheadStats()
        self._saved_s = self._spent_s = 0.0
        self._hits = self._foreseen = 0.0
        self._num_recent = 0
        self._pause = 0

    @property
    def is_open(self) -> bool:
        """Whether to draft ahead."""
        return self._pause == 0

    @property
    def floor(self) -> float:
        """Least probability of an outcome to prepare for: higher when hits are rarer than predicted."""
        ratio = (self._foreseen + PRIOR_HITS) / (self._hits + PRIOR_HITS)
        return MIN_OUTCOME * min(3.0, max(0.5, ratio))

    def looked_up(self, *, is_hit: bool, foreseen: float, saved_s: float) -> None:
        """Note a request.

        Args:
            is_hit: Whether its proposal was ready.
            foreseen: The draft's estimate of the probability that it would be.
            saved_s: Seconds of forwards and messages that the request did not wait for.
        """
        self.stats.lookups += 1
        self.stats.hits += is_hit
        if self._pause:
            self._pause -= 1
            return
        self._saved_s = DECAY * self._saved_s + saved_s
        self._spent_s *= DECAY
        self._hits = SLOW_DECAY * self._hits + is_hit
        self._foreseen = SLOW_DECAY * self._foreseen + foreseen
        self._num_recent += 1
        if self._num_recent >= MIN_LOOKUPS and self._spent_s > self._saved_s:
            self._pause = PAUSE
            self._num_recent, self._saved_s, self._spent_s = 0, 0.0, 0.0

    def worked(self, num_rows: int, stolen_s: float, num_forwards: int = 1) -> None:
        """Note forwards of draft-ahead that delayed other work by `stolen_s` seconds."""
        self.stats.forwards += num_forwards
        self.stats.rows += num_rows
        self._spent_s += stolen_s

    def delayed(self, seconds: float) -> None:
        """Note that a request waited for a forward of draft-ahead to end."""
        self._spent_s += seconds
