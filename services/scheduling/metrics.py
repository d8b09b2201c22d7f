"""Metrics of a worker: steps, batches, queue, and the state of its cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

from gammaray.telemetry.meter import Meter
from gammaray.types import WorkerTotals
from services.engine.core.kv_cache import CacheStats

ARMS, OUTCOMES = ("stable", "candidate"), ("accepted", "rejected")
"""Which version of a drafter that learns proposed, and what became of a proposal's first token."""

NO_FIRST_TOKENS = dict.fromkeys(product(ARMS, OUTCOMES), 0)
"""Counts of first tokens before any proposal."""


@dataclass
class AheadStats:
    lookups: int = 0  # requested proposals that follow another one of the session
    hits: int = 0  # those that were prepared, so that the request took no forward
    forwards: int = 0  # forwards spent on drafting ahead


class WorkerMeter:
    """The metrics of one worker; written by the engine's thread.

    Args:
        num_queued: Returns the number of blocks waiting or running; called at every collection.
        stats: Returns the cache's counters; called at every collection.

    Attributes:
        ahead: Written by what drafts ahead.
        first_tokens: Counts by arm and outcome, see `services.learning.versions`.
    """

    def __init__(self, role: str, num_queued: Callable[[], int], stats: Callable[[], CacheStats]) -> None:
        self.meter = meter = Meter()
        self.step_s = meter.histogram("gammaray.worker.step.duration", role=role)
        self._blocks = meter.histogram("gammaray.worker.step.blocks", role=role)
        self._prefix_queries = meter.counter("gammaray.worker.prefix_cache.queries", role=role)
        self._prefix_hits = meter.counter("gammaray.worker.prefix_cache.hits", role=role)
        self.ahead = AheadStats()
        self.first_tokens: Mapping[tuple[str, str], int] = NO_FIRST_TOKENS
        for arm, outcome in self.first_tokens:
            read = partial(self._num_first_tokens, arm, outcome)
            meter.observed("gammaray.worker.drafter.first_tokens", read, role=role, arm=arm, outcome=outcome)
        meter.gauge("gammaray.worker.queue_depth", num_queued, role=role)
        meter.gauge("gammaray.worker.cache.used", lambda: stats().cache_bytes, role=role)
        meter.gauge("gammaray.worker.cache.budget", lambda: stats().cache_budget_bytes, role=role)
        meter.gauge("gammaray.worker.cache.retained", lambda: stats().retained_bytes, role=role)
        meter.observed("gammaray.worker.cache.evictions", lambda: stats().num_evictions, role=role)

    def looked_up(self, num_tokens: int, num_cached: int) -> None:
        """Count the tokens with which a session starts on this worker, and how many of them were cached."""
        self._prefix_queries.value += num_tokens
        self._prefix_hits.value += num_cached

    def step(self, seconds: float, num_blocks: int) -> None:
        self.step_s.observe(seconds)
        self._blocks.observe(num_blocks)

    def _num_first_tokens(self, arm: str, outcome: str) -> int:
        return self.first_tokens[arm, outcome]

    @property
    def totals(self) -> WorkerTotals:
        """Totals since the start of the worker."""
        return WorkerTotals(
            steps=sum(self._blocks.counts),
            step_blocks=int(self._blocks.total),
            step_us=int(self.step_s.total * 1e6),
            ahead_lookups=self.ahead.lookups,
            ahead_hits=self.ahead.hits,
        )
