"""Metrics of a worker: steps, batches, waits, blocks, and the state of its cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gammaray.errors import GammarayError
from gammaray.telemetry.meter import Meter
from gammaray.types import WorkerTotals
from services.engine.core.kv_cache import CacheStats
from services.scheduling.tasks import NeedTokens


@dataclass
class AheadStats:
    """Counters of draft-ahead.

    Attributes:
        lookups: Requested proposals that follow another one of the session.
        hits: Those that were prepared, so that the request took no forward.
        forwards: Forwards spent on drafting ahead.
        rows: Tokens fed in them.
        used_rows: Those that became part of a proposal or of the text.
    """

    lookups: int = 0
    hits: int = 0
    forwards: int = 0
    rows: int = 0
    used_rows: int = 0

    @property
    def wasted_rows(self) -> int:
        """Tokens fed ahead and not used, including those that may still be used."""
        return self.rows - self.used_rows


class WorkerMeter:
    """The metrics of one worker; written by the engine's thread.

    Args:
        role: draft or target.

    Attributes:
        meter: Holds the metrics.
        step_s: Seconds of the steps that served blocks.
    """

    def __init__(self, role: str) -> None:
        self.meter = meter = Meter()
        self.step_s = meter.histogram("gammaray.worker.step.duration", role=role)
        self._role = role
        self._blocks = meter.histogram("gammaray.worker.step.blocks", role=role)
        self._tokens = meter.counter("gammaray.worker.step.tokens", role=role)
        self._queue_s = meter.histogram("gammaray.worker.queue.time", role=role)
        self._outcomes = {
            outcome: meter.counter("gammaray.worker.blocks", role=role, outcome=outcome)
            for outcome in ("done", "need", "error")
        }
        self._prefix_queries = meter.counter("gammaray.worker.prefix_cache.queries", role=role)
        self._prefix_hits = meter.counter("gammaray.worker.prefix_cache.hits", role=role)
        if role == "target":
            self._mask_s = meter.histogram("gammaray.worker.mask.duration", role=role)
            self._mask_rows = meter.counter("gammaray.worker.mask.rows", role=role)
        self._ahead: AheadStats | None = None

    def watch(self, num_queued: Callable[[], int], stats: Callable[[], CacheStats]) -> None:
        """Read the number of blocks waiting or running, and the cache's counters, at every collection."""
        meter, role = self.meter, self._role
        meter.gauge("gammaray.worker.queue_depth", num_queued, role=role)
        meter.gauge("gammaray.worker.sessions", lambda: stats().num_sessions, role=role)
        meter.gauge("gammaray.worker.cache.used", lambda: stats().cache_bytes, role=role)
        meter.gauge("gammaray.worker.cache.budget", lambda: stats().cache_budget_bytes, role=role)
        meter.gauge("gammaray.worker.cache.retained", lambda: stats().retained_bytes, role=role)
        meter.observed("gammaray.worker.cache.evictions", lambda: stats().num_evictions, role=role)

    def watch_ahead(self, stats: AheadStats, *, has_rows: bool = True) -> None:
        """Read the counters of draft-ahead at every collection; those of rows only if they are counted."""
        self._ahead = stats
        self.meter.observed("gammaray.draft_ahead.lookups", lambda: stats.lookups)
        self.meter.observed("gammaray.draft_ahead.hits", lambda: stats.hits)
        if not has_rows:
            return
        self.meter.observed("gammaray.draft_ahead.rows", lambda: stats.used_rows, use="used")
        self.meter.observed("gammaray.draft_ahead.rows", lambda: stats.wasted_rows, use="wasted")

    def waited(self, seconds: float) -> None:
        """Count the wait of one block before its first step."""
        self._queue_s.observe(seconds)

    def looked_up(self, num_tokens: int, num_cached: int) -> None:
        """Count the tokens with which a session starts on this worker, and how many of them were cached."""
        self._prefix_queries.value += num_tokens
        self._prefix_hits.value += num_cached

    def step(self, seconds: float, num_blocks: int, num_tokens: int) -> None:
        """Count one step."""
        self.step_s.observe(seconds)
        self._blocks.observe(num_blocks)
        self._tokens.value += num_tokens

    def masked(self, seconds: float, num_rows: int) -> None:
        """Count the computation of the masks of a grammar for one block; on targets only."""
        self._mask_s.observe(seconds)
        self._mask_rows.value += num_rows

    def answered(self, outcome: object) -> None:
        """Count the answer to one block."""
        kind = "need" if isinstance(outcome, NeedTokens) else "done"
        kind = "error" if isinstance(outcome, GammarayError) else kind
        self._outcomes[kind].value += 1

    @property
    def totals(self) -> WorkerTotals:
        """Totals since the start of the worker."""
        ahead = self._ahead
        return WorkerTotals(
            steps=sum(self._blocks.counts),
            step_blocks=int(self._blocks.total),
            step_us=int(self.step_s.total * 1e6),
            ahead_lookups=ahead.lookups if ahead is not None else 0,
            ahead_hits=ahead.hits if ahead is not None else 0,
        )
