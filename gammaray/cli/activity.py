"""Load of a cluster and benefit of speculation, computed from two snapshots of its status.

Totals count from the start of a process, so rates are differences over the time between the snapshots. A
process that is missing in the first snapshot has rates of zero. Where nothing happened in between, ratios are
those since the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias, TypeVar

from gammaray.types import ProcessStatus, SpeculationTotals, WorkerTotals

Pair: TypeAlias = tuple[ProcessStatus, ProcessStatus]
"""A process in both snapshots; twice in the second one if it is missing in the first."""

TotalsT = TypeVar("TotalsT", SpeculationTotals, WorkerTotals)


@dataclass(frozen=True)
class Speculation:
    """Activity of one orchestrator, or of all of them."""

    pid: int  # process id of the orchestrator; 0 for all of them
    running: int
    waiting: int  # requests that wait for admission
    tokens_per_s: float
    cycles_per_s: float
    failures_per_s: float  # requests per second that ended in an error
    alpha: float | None  # accepted over tested tokens; None when nothing was tested
    acceptance_rate: float | None  # accepted over drafted tokens; None when nothing was drafted
    tokens_per_cycle: float | None  # None before the first cycle
    gamma: float | None  # mean gamma; None before the first cycle
    speedup: float | None  # speedup over plain decoding; None while unknown


@dataclass(frozen=True)
class Worker:
    role: str  # draft or target
    address: str  # host:port
    pid: int
    healthy: bool
    sessions: int  # sessions with a cache
    queue: int  # blocks waiting or running
    busy: float  # share of the time spent in steps
    batch: float | None  # mean blocks per step; None before the first step
    steps_per_s: float
    cache_use: float  # share of the KV cache budget in use
    ahead_hit_rate: float | None  # prepared proposals; None before the first, and for targets without a head


@dataclass(frozen=True)
class Activity:
    """Activity of the whole cluster between two snapshots."""

    seconds: float
    total: Speculation  # all orchestrators together
    orchestrators: tuple[Speculation, ...]
    workers: tuple[Worker, ...]  # each worker, targets first


def measure(before: Sequence[ProcessStatus], after: Sequence[ProcessStatus], seconds: float) -> Activity:
    """Return the activity between two snapshots of a cluster's status, taken `seconds` apart."""
    past = {_identity(process): process for process in before}
    pairs = [(past.get(_identity(process), process), process) for process in after]
    orchestrators = [pair for pair in pairs if pair[1].role == "orchestrator"]
    orchestrators.sort(key=lambda pair: pair[1].pid)
    workers = [pair for pair in pairs if pair[1].role in ("target", "draft")]
    workers.sort(key=lambda pair: (pair[1].role != "target", pair[1].address))
    return Activity(
        seconds,
        _speculation(0, orchestrators, seconds),
        tuple(_speculation(pair[1].pid, [pair], seconds) for pair in orchestrators),
        tuple(_worker(*pair, seconds) for pair in workers),
    )


def _identity(process: ProcessStatus) -> tuple[str, int, str]:
    return process.role, process.pid, process.address


def _spent(before: TotalsT | None, after: TotalsT) -> TotalsT:
    start = asdict(after if before is None else before)
    # Totals of other orchestrators may be a second old, so differences could be negative: clamp to 0.
    return type(after)(**{name: max(0, total - start[name]) for name, total in asdict(after).items()})


def _sum(totals: Sequence[SpeculationTotals]) -> SpeculationTotals:
    names = [field.name for field in fields(SpeculationTotals)]
    return SpeculationTotals(**{name: sum(getattr(own, name) for own in totals) for name in names})


def _speculation(pid: int, pairs: Sequence[Pair], seconds: float) -> Speculation:
    totals = [(past.speculation_totals, now.speculation_totals or SpeculationTotals()) for past, now in pairs]
    spent, ever = _sum([_spent(*pair) for pair in totals]), _sum([now for _, now in totals])
    return Speculation(
        pid=pid,
        running=sum(process.sessions for _, process in pairs),
        waiting=sum(process.num_queued for _, process in pairs),
        tokens_per_s=spent.emitted_tokens / seconds,
        cycles_per_s=spent.cycles / seconds,
        failures_per_s=spent.failed_requests / seconds,
        alpha=_ratio("accepted_tokens", "tested_tokens", spent, ever),
        acceptance_rate=_ratio("accepted_tokens", "draft_tokens", spent, ever),
        tokens_per_cycle=_ratio("emitted_tokens", "cycles", spent, ever),
        gamma=_ratio("gamma_sum", "cycles", spent, ever),
        speedup=_ratio("plain_us", "decode_us", spent, ever),
    )


def _worker(before: ProcessStatus, process: ProcessStatus, seconds: float) -> Worker:
    ever = process.worker_totals or WorkerTotals()
    spent = _spent(before.worker_totals, ever)
    return Worker(
        role=process.role,
        address=process.address,
        pid=process.pid,
        healthy=process.healthy,
        sessions=process.sessions,
        queue=process.num_queued,
        busy=min(1.0, spent.step_us * 1e-6 / seconds),
        batch=_ratio("step_blocks", "steps", spent, ever),
        steps_per_s=spent.steps / seconds,
        cache_use=process.cache_bytes / process.cache_budget_bytes if process.cache_budget_bytes else 0.0,
        ahead_hit_rate=_ratio("ahead_hits", "ahead_lookups", spent, ever),
    )


def _ratio(part: str, whole: str, *totals: Any) -> float | None:
    """Return the ratio of two counts, of the first totals in which there is one."""
    return next((getattr(one, part) / count for one in totals if (count := getattr(one, whole)) > 0), None)
