"""Resources of the processes of a cluster: memory, file descriptors, sessions, queues and KV cache."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from gammaray import ProcessStatus
from orchestrator.storage.client import MAX_CONNECTIONS
from tests.support.cluster.cluster_helpers import CACHE_BUDGET_MB

POOL_THREAD = "event_engine"
"""Name of the threads of gRPC's own pool, in our processes and in Ray's. It starts one whenever all are busy,
at most one a second, and keeps them as long as there is work every 20 seconds: it is as large as at its worst
moment so far, however short that was."""

MAX_GROWTH_MB = 64.0
"""Resident memory that a process may gain between warm-up and end: allocators keep some of a peak."""

MAX_GROWTH_SHARE = 0.25
MAX_MORE_FILES = 20
"""Further files, besides the pool of connections between an orchestrator and Redis: it is as large as at its
busiest moment so far, at most `MAX_CONNECTIONS`, at both ends."""

SETTLE_S = 60.0


@dataclass(frozen=True)
class Holding:
    """Resources of one process."""

    rss_mb: float
    files: int
    sessions: int
    queued: int
    cache_bytes: int
    threads: int = 0
    pool_threads: int = 0

    def __str__(self) -> str:
        return (
            f"{self.rss_mb:7.0f} MiB {self.files:4} files {self.sessions:3} sessions "
            f"{self.queued:3} queued {self.cache_bytes / 2**20:6.1f} MiB KV"
        )


def census(processes: list[ProcessStatus]) -> dict[tuple[str, int], Holding]:
    """Return the resources of each process in a cluster's status, by role and process id."""
    held = {}
    for process in processes:
        if process.pid == 0:
            continue
        try:
            alive = psutil.Process(process.pid)
            rss_mb, files = alive.memory_info().rss / 2**20, alive.num_fds()
            names = _thread_names(process.pid)
        except (psutil.Error, OSError):
            continue
        pooled = names.count(POOL_THREAD)
        held[process.role, process.pid] = Holding(
            rss_mb,
            files,
            process.sessions,
            process.num_queued,
            process.cache_bytes,
            len(names) - pooled,
            pooled,
        )
    return held


def _thread_names(pid: int) -> list[str]:
    names = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:  # it has ended meanwhile
            continue
    return names


def settled(
    status: Callable[[], list[ProcessStatus]], before: Mapping[tuple[str, int], Holding] | None = None
) -> dict[tuple[str, int], Holding]:
    """Wait until no process holds a session or a block, and return the resources then."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        held = census(status())
        is_quiet = not any(h.sessions or h.queued for h in held.values())
        has_grown = before is not None and growth(before, held)
        if (is_quiet and not has_grown) or time.monotonic() > deadline:
            return held
        time.sleep(0.2)


def growth(before: Mapping[tuple[str, int], Holding], after: Mapping[tuple[str, int], Holding]) -> list[str]:
    """Return descriptions of lost processes and of growth beyond the bounds."""
    found = []
    pools = {"orchestrator": 1, "redis": sum(role == "orchestrator" for role, _ in before)}
    for (role, pid), old in before.items():
        new = after.get((role, pid))
        who = f"{role} (process {pid})"
        if new is None:
            found.append(f"{who} is gone")
            continue
        bound_mb = max(MAX_GROWTH_MB, MAX_GROWTH_SHARE * old.rss_mb)
        if role in ("draft", "target"):
            bound_mb += int(CACHE_BUDGET_MB)  # what ended sessions leave fills it
        if new.rss_mb - old.rss_mb > bound_mb:
            found.append(f"{who} has grown from {old.rss_mb:.0f} to {new.rss_mb:.0f} MiB")
        if new.files - old.files > MAX_MORE_FILES + MAX_CONNECTIONS * pools.get(role, 0):
            found.append(f"{who} holds {new.files} files, {old.files} before")
        for name in ("sessions", "queued", "cache_bytes"):
            if getattr(new, name) > getattr(old, name):
                found.append(f"{who} holds {getattr(new, name)} {name}, {getattr(old, name)} before")
    return found
