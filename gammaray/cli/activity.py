"""Load of a cluster and benefit of speculation, computed from two snapshots of its status.

Totals count from the start of a process, so rates are differences over the time between the snapshots. A
process that is missing in the first snapshot has rates of zero. Where nothing happened in between, ratios are
those since the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from gammaray.types import ProcessStatus, SpeculationTotals, WorkerTotals


@dataclass(frozen=True)
class Speculation:
    """Activity of one orchestrator, or of all of them.

    Attributes:
        pid: Process id of the orchestrator; 0 for all of them.
        waiting: Requests that wait for admission.
        failures_per_s: Requests per second that ended in an error.
        alpha: Accepted over tested tokens; None when nothing was tested.
        acceptance_rate: Accepted over drafted tokens; None when nothing was drafted.
        tokens_per_cycle: None before the first cycle.
        gamma: Mean gamma; None before the first cycle.
        speedup: Speedup over plain decoding; None while unknown.
    """

    pid: int
    running: int
    waiting: int
    tokens_per_s: float
    cycles_per_s: float
    failures_per_s: float
    alpha: float | None
    acceptance_rate: float | None
    tokens_per_cycle: float | None
    gamma: float | None
    speedup: float | None


@dataclass(frozen=True)
class Worker:
    """Activity of one worker.

    Attributes:
        role: draft or target.
        address: host:port.
        sessions: Sessions with a cache.
        queue: Blocks waiting or running.
        busy: Share of the time spent in steps.
        batch: Mean blocks per step; None before the first step.
        cache_use: Share of the KV cache budget in use.
        ahead_hit_rate: Share of proposals that were prepared ahead; None before the first, and for
            targets without a head.
    """

    role: str
    address: str
    pid: int
    healthy: bool
    sessions: int
    queue: int
    busy: float
    batch: float | None
    steps_per_s: float
    cache_use: float
    ahead_hit_rate: float | None


@dataclass(frozen=True)
class Activity:
    """Activity of the whole cluster between two snapshots.

    Attributes:
        total: All orchestrators together.
        workers: Each worker, targets first.
    """

    seconds: float
    total: Speculation
    orchestrators: tuple[Speculation, ...]
    workers: tuple[Worker, ...]


def measure(before: Sequence[ProcessStatus], after: Sequence[ProcessStatus], seconds: float) -> Activity:
    """Return the activity between two snapshots of a cluster's status, taken `seconds` apart."""
    past = {(process.role, process.pid, process.address): process for process in before}
    orchestrators = [process for process in after if process.role == "orchestrator"]
    orchestrators.sort(key=lambda process: process.pid)
    workers = [process for process in after if process.role in ("target", "draft")]
    spent = [_spent(past, process) for process in orchestrators]
    return Activity(
        seconds,
        _speculation(0, orchestrators, spent, seconds),
        tuple(
            _speculation(process.pid, [process], [own], seconds)
            for process, own in zip(orchestrators, spent, strict=True)
        ),
        tuple(
            _worker(past, process, seconds)
            for process in sorted(workers, key=lambda worker: (worker.role != "target", worker.address))
        ),
    )


Past = Mapping[tuple[str, int, str], ProcessStatus]
TotalsT = TypeVar("TotalsT", SpeculationTotals, WorkerTotals)


def _spent(past: Past, process: ProcessStatus) -> SpeculationTotals:
    before = past.get((process.role, process.pid, process.address))
    start = before.speculation_totals if before is not None else process.speculation_totals
    return _minus(process.speculation_totals or SpeculationTotals(), start or SpeculationTotals())


def _minus(after: TotalsT, before: TotalsT) -> TotalsT:
    # Totals of other orchestrators may be a second old, so differences could be negative: clamp to 0.
    names = [field.name for field in fields(after)]
    return type(after)(**{name: max(0, getattr(after, name) - getattr(before, name)) for name in names})


def _sum(totals: Sequence[SpeculationTotals]) -> SpeculationTotals:
    names = [field.name for field in fields(SpeculationTotals)]
    return SpeculationTotals(**{name: sum(getattr(own, name) for own in totals) for name in names})


def _speculation(
    pid: int, processes: Sequence[ProcessStatus], spent: Sequence[SpeculationTotals], seconds: float
) -> Speculation:
    now = _sum(spent)
    ever = _sum([process.speculation_totals or SpeculationTotals() for process in processes])

    def ratio(part: str, whole: str) -> float | None:
        return _ratio(now, ever, lambda totals: (getattr(totals, part), getattr(totals, whole)))

    return Speculation(
        pid=pid,
        running=sum(process.sessions for process in processes),
        waiting=sum(process.num_queued for process in processes),
        tokens_per_s=now.emitted_tokens / seconds,
        cycles_per_s=now.cycles / seconds,
        failures_per_s=now.failed_requests / seconds,
        alpha=ratio("accepted_tokens", "tested_tokens"),
        acceptance_rate=ratio("accepted_tokens", "draft_tokens"),
        tokens_per_cycle=ratio("emitted_tokens", "cycles"),
        gamma=ratio("gamma_sum", "cycles"),
        speedup=ratio("plain_us", "decode_us"),
    )


def _worker(past: Past, process: ProcessStatus, seconds: float) -> Worker:
    ever = process.worker_totals or WorkerTotals()
    before = past.get((process.role, process.pid, process.address))
    start = (before.worker_totals if before is not None else None) or ever
    now = _minus(ever, start)
    return Worker(
        role=process.role,
        address=process.address,
        pid=process.pid,
        healthy=process.healthy,
        sessions=process.sessions,
        queue=process.num_queued,
        busy=min(1.0, now.step_us * 1e-6 / seconds),
        batch=_ratio(now, ever, lambda totals: (totals.step_blocks, totals.steps)),
        steps_per_s=now.steps / seconds,
        cache_use=process.cache_bytes / process.cache_budget_bytes if process.cache_budget_bytes else 0.0,
        ahead_hit_rate=_ratio(now, ever, lambda totals: (totals.ahead_hits, totals.ahead_lookups)),
    )


def _ratio(now: Any, ever: Any, pair: Callable[[Any], tuple[float, float]]) -> float | None:
    for totals in (now, ever):
        part, whole = pair(totals)
        if whole > 0:
            return part / whole
    return None
