"""Whether drafting ahead pays, from what it saved and what it cost.

It saves the forwards that a request would have waited for, and the request where the proposal was at hand.
It costs the wait for a forward that is under way when a request arrives, and, on cores that others want as
well, the time it takes from them: while this thread waits for its core somebody else runs, and would have run
sooner without it.
"""

from __future__ import annotations

from services.scheduling.metrics import AheadStats

__all__ = ["Throttle"]

DECAY, SLOW_DECAY = 0.95, 0.99
"""Per lookup. Time saved and spent count for some twenty of them, hits foreseen and come for a hundred."""

PRIOR_HITS = 3.0
"""Hits foreseen that came, as the prior of how good the draft's foresight is."""

MIN_LOOKUPS = 10
"""Before so many lookups nothing is concluded."""

PAUSE = 64
"""Lookups to sit out after it did not pay, before it is tried again."""

MIN_OUTCOME = 0.08
"""Outcomes less likely than this are not prepared for: one more row costs about half a forward on a CPU."""


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
        """Probability from which on an outcome is prepared for: higher when hits are rarer than foreseen."""
        ratio = (self._foreseen + PRIOR_HITS) / (self._hits + PRIOR_HITS)
        return MIN_OUTCOME * min(3.0, max(0.5, ratio))

    def looked_up(self, *, is_hit: bool, foreseen: float, saved_s: float) -> None:
        """Note a request.

        Args:
            is_hit: Whether its proposal was ready.
            foreseen: The probability that it would be, as far as the draft could tell.
            saved_s: Forwards and messages it did not have to wait for, in seconds.
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
        """Note forwards of draft-ahead that others waited `stolen_s` seconds for."""
        self.stats.forwards += num_forwards
        self.stats.rows += num_rows
        self._spent_s += stolen_s

    def delayed(self, seconds: float) -> None:
        """Note that a request waited for draft-ahead to make way."""
        self._spent_s += seconds
