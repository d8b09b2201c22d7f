"""Resources of the processes of a cluster: memory, file descriptors, sessions, queues and KV cache."""

import time
from collections.abc import Callable, Mapping
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


Process = tuple[str, int]
"""Role and process id."""

Holding = dict[str, float]
"""Resources of one process, by measure."""


def census(processes: list[ProcessStatus]) -> dict[Process, Holding]:
    """Return the resources of each process in a cluster's status."""
    held = {}
    for process in processes:
        if process.pid == 0:
            continue
        try:
            alive = psutil.Process(process.pid)
            found: Holding = {"rss_mb": alive.memory_info().rss / 2**20, "files": alive.num_fds()}
            names = _thread_names(process.pid)
        except (psutil.Error, OSError):
            continue
        pooled = names.count(POOL_THREAD)
        found |= {"threads": len(names) - pooled, "pool_threads": pooled}
        if process.role in ("orchestrator", "draft", "target"):
            found |= {"sessions": process.sessions, "queued": process.num_queued}
        if process.role in ("draft", "target"):
            found["kv_mb"] = process.cache_bytes / 2**20
        held[process.role, process.pid] = found
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
    status: Callable[[], list[ProcessStatus]], before: Mapping[Process, Holding] | None = None
) -> dict[Process, Holding]:
    """Wait until no process holds a session or a block, and return the resources then."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        held = census(status())
        is_quiet = not any(found.get("sessions") or found.get("queued") for found in held.values())
        has_grown = before is not None and growth(before, held)
        if (is_quiet and not has_grown) or time.monotonic() > deadline:
            return held
        time.sleep(0.2)


def growth(before: Mapping[Process, Holding], after: Mapping[Process, Holding]) -> list[str]:
    """Return descriptions of lost processes and of growth beyond the bounds."""
    found = []
    pools = {"orchestrator": 1, "redis": sum(role == "orchestrator" for role, _ in before)}
    for (role, pid), old in before.items():
        who = f"{role} (process {pid})"
        if (new := after.get((role, pid))) is None:
            found.append(f"{who} is gone")
            continue
        bound_mb = max(MAX_GROWTH_MB, MAX_GROWTH_SHARE * old["rss_mb"])
        if role in ("draft", "target"):
            bound_mb += int(CACHE_BUDGET_MB)  # what ended sessions leave fills it
        files = MAX_MORE_FILES + MAX_CONNECTIONS * pools.get(role, 0)
        more = {"rss_mb": bound_mb, "files": files, "sessions": 0, "queued": 0, "kv_mb": 0}
        found += [
            f"{who} holds {new[name]:g} {name}, {old[name]:g} before"
            for name, bound in more.items()
            if new.get(name, 0.0) - old.get(name, 0.0) > bound
        ]
    return found
