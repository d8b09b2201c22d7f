"""Backoff after failures, and adaptive timeouts for answers."""

from __future__ import annotations

import time

PRICE = 4.0
"""The first pause is this many times the seconds that the failure cost."""

MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 30.0


class Backoff:
    """Exponential backoff: a pause is proportional to the cost of the failure, doubled per failure in a row.

    Many callers may share one instance: concurrent failures count as one, and after a pause a single caller
    tries while the others wait for its outcome.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._failed_at = 0.0
        self._resume_at = 0.0

    @property
    def ready(self) -> bool:
        """Whether a call may be tried now."""
        return self._failures == 0 or time.monotonic() >= self._resume_at

    def trying(self, limit_s: float) -> None:
        """Record an attempt: after a failure other callers wait for its outcome, for at most `limit_s`."""
        if self._failures > 0:
            self._resume_at = time.monotonic() + limit_s

    def failed(self, lost_s: float) -> None:
        now = time.monotonic()
        if self._failures > 0 and now - lost_s < self._failed_at:
            return  # the call began before the last failure was recorded: the same incident
        pause_s = min(MAX_PAUSE_S, max(MIN_PAUSE_S, PRICE * lost_s) * 2.0**self._failures)
        self._failures = min(self._failures + 1, 16)
        self._failed_at, self._resume_at = now, now + pause_s

    def note_late_answer(self) -> None:
        """End the pause after a first failure, which was only a delay; later failures keep theirs."""
        if self._failures == 1:
            self._resume_at = 0.0

    def succeeded(self) -> None:
        self._failures = 0


class AdaptiveTimeout:
    """Adaptive timeout: a multiple of recent answer times, as TCP's retransmission timeout (RFC 6298)."""

    FACTOR = 4.0
    """Multiple of TCP's timeout: a proposal's time varies with its depth and the worker's other sessions."""

    NUM_SAMPLES = 8
    """Samples needed for an estimate; before that, as while a worker warms up, the timeout is the limit."""

    def __init__(self, least_s: float = 0.25) -> None:
        self._least_s = least_s
        self._mean = self._deviation = 0.0
        self._num_samples = 0

    def observe(self, seconds: float) -> None:
        """Record the seconds until an answer, or until the wait for it was abandoned."""
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
