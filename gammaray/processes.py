"""The state of a cluster's processes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ProcessStatus", "SpeculationTotals", "WorkerTotals"]


@dataclass(frozen=True)
class WorkerTotals:
    """What a worker has done since its start; see the proto of the same name for each field."""

    steps: int = 0
    step_blocks: int = 0
    step_us: int = 0
    ahead_lookups: int = 0
    ahead_hits: int = 0


@dataclass(frozen=True)
class SpeculationTotals:
    """What an orchestrator's cycles came to since its start; see the proto of the same name."""

    cycles: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    tested_tokens: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0
    gamma_sum: int = 0
    decode_us: int = 0
    plain_us: int = 0
    requests: int = 0
    failed_requests: int = 0


@dataclass(frozen=True)
class ProcessStatus:
    """One process of the cluster; `role` is orchestrator, draft, target, redis or proxy.

    `num_queued` counts blocks waiting or running of a worker, and requests waiting of an orchestrator. Only
    workers have `cache_bytes` (KV cache in use, of `cache_budget_bytes`), `worker_totals` and `kernel` (what
    computes the model's forwards), only orchestrators `speculation_totals` and `accepted_per_position` (entry
    j: accepted tokens at depth j + 1).
    """

    role: str
    pid: int
    address: str
    model: str
    healthy: bool
    sessions: int
    metrics_address: str = ""
    num_queued: int = 0
    cache_bytes: int = 0
    cache_budget_bytes: int = 0
    worker_totals: WorkerTotals | None = None
    speculation_totals: SpeculationTotals | None = None
    accepted_per_position: tuple[int, ...] = ()
    kernel: str = ""
