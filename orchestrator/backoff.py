"""How long to leave a failing helper alone."""

from __future__ import annotations

import time

__all__ = ["Backoff"]

PRICE = 8.0
"""The first pause is this many times what the failure cost: trying costs at most some ninth of the time."""

MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 30.0


class Backoff:
    """Pauses after failures: longer the more a failure cost, doubling with each one in a row."""

    def __init__(self) -> None:
        self._failures = 0
        self._resume_at = 0.0

    @property
    def ready(self) -> bool:
        """Whether it may be tried now."""
        return self._failures == 0 or time.monotonic() >= self._resume_at

    def failed(self, lost_s: float) -> None:
        """Take note of a failure that cost `lost_s` seconds."""
        pause_s = min(MAX_PAUSE_S, max(MIN_PAUSE_S, PRICE * lost_s) * 2.0**self._failures)
        self._failures = min(self._failures + 1, 16)
        self._resume_at = time.monotonic() + pause_s

    def succeeded(self) -> None:
        """Forget past failures."""
        self._failures = 0
