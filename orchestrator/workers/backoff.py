"""How long to leave a failing helper alone."""

from __future__ import annotations

import time

__all__ = ["Backoff", "Patience"]

PRICE = 4.0
"""The first pause is this many times what the failure cost."""

MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 30.0


class Backoff:
    """Pauses after failures: longer the more a failure cost, doubling with each one in a row.

    Many callers may share one: what fails at the same time is one failure, and after a pause one of them
    tries for all.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._failed_at = 0.0
        self._resume_at = 0.0

    @property
    def ready(self) -> bool:
        """Whether it may be tried now."""
        return self._failures == 0 or time.monotonic() >= self._resume_at

    def trying(self, limit_s: float) -> None:
        """Take note that somebody tries: after a failure the others wait for the outcome.

        Args:
            limit_s: Seconds after which somebody else may try, whatever became of this.
        """
        if self._failures > 0:
            self._resume_at = time.monotonic() + limit_s

    def failed(self, lost_s: float) -> None:
        """Take note of a failure that cost `lost_s` seconds."""
        now = time.monotonic()
        if self._failures > 0 and now - lost_s < self._failed_at:
            return  # it began before the last failure was known: the same incident
        pause_s = min(MAX_PAUSE_S, max(MIN_PAUSE_S, PRICE * lost_s) * 2.0**self._failures)
        self._failures = min(self._failures + 1, 16)
        self._failed_at, self._resume_at = now, now + pause_s

    def lives(self) -> None:
        """Take note of a sign of life: after a first failure it may be tried at once, it was held up.

        One that goes on failing is late all the time, and gives signs of life, too.
        """
        if self._failures == 1:
            self._resume_at = 0.0

    def succeeded(self) -> None:
        """Forget past failures."""
        self._failures = 0


class Patience:
    """How long to wait for an answer: a multiple of what answers took of late, as TCP does it (RFC 6298).

    Args:
        least_s: Never less than this.
    """

    FACTOR = 4.0
    """Times of what TCP would wait: a proposal's time varies with its depth and the worker's company."""

    NUM_SAMPLES = 8
    """Answers from which on it is believed; before, and of a worker that warms up, the limit counts."""

    def __init__(self, least_s: float = 0.25) -> None:
        self._least_s = least_s
        self._mean = self._deviation = 0.0
        self._num_samples = 0

    def observe(self, seconds: float) -> None:
        """Take note of an answer that took so long, or of a wait that was given up after so long."""
        if self._num_samples == 0:
            self._mean, self._deviation = seconds, seconds / 2
        self._deviation += (abs(seconds - self._mean) - self._deviation) / 4
        self._mean += (seconds - self._mean) / 8
        self._num_samples += 1

    def wait_s(self, limit_s: float) -> float:
        """Return how long to wait, at most `limit_s`."""
        if self._num_samples < self.NUM_SAMPLES:
            return limit_s
        return min(limit_s, max(self._least_s, self.FACTOR * (self._mean + 4 * self._deviation)))
