"""The load of a worker: counters that its scheduler keeps, and rates between two readings."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class LoadCounters:
    """Sums since the start of the worker."""

    block_s: float = 0.0  # seconds from arrival to answer, over all blocks answered
    busy_s: float = 0.0  # seconds spent in steps that served blocks
    lookups: int = 0  # requested proposals that draft-ahead may have prepared
    hits: int = 0  # those that it had prepared
    cache_use: float = 0.0  # share of the KV cache budget in use; not a sum but the current value


@dataclass(frozen=True)
class LoadReport:
    in_flight: float  # mean number of blocks waiting or running: their stays per second (Little's law)
    busy: float  # share of the time in steps that served blocks
    hit_rate: float  # share of the requested proposals that were prepared; 0 when none was requested
    cache_use: float  # share of the KV cache budget in use


class LoadReporter:
    """Turns counters into rates between two calls; the first call covers the time since construction."""

    def __init__(self) -> None:
        self._before, self._since = LoadCounters(), time.monotonic()

    def report(self, now: LoadCounters) -> LoadReport:
        """Return the load since the last call."""
        at, before = time.monotonic(), self._before
        seconds = max(at - self._since, 1e-3)
        lookups = now.lookups - before.lookups
        self._before, self._since = now, at
        return LoadReport(
            in_flight=(now.block_s - before.block_s) / seconds,
            busy=min(1.0, (now.busy_s - before.busy_s) / seconds),
            hit_rate=(now.hits - before.hits) / lookups if lookups > 0 else 0.0,
            cache_use=now.cache_use,
        )
