"""Resources of an idle cluster: its processes by role, the workers' own reports, Redis."""

import asyncio
import re
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

from gammaray import Client, ProcessStatus
from tests.fuzz.census import census, settled
from tests.soak.samples import Apis
from tests.support.cluster.cluster_helpers import asked

SCRAPE_TIMEOUT_S = 10.0
QUIET_S = 1.0
"""Time within which a process frees resources after its last response."""


@dataclass(frozen=True)
class Census:
    at_s: float
    rest_s: float
    figures: dict[tuple[str, str], float]
    processes: dict[str, tuple[int, ...]]


class Observer:
    def __init__(self, apis: Apis, launcher_pid: int, redis: Redis) -> None:
        self._apis, self._launcher_pid, self._redis = apis, launcher_pid, redis

    async def census(self, began_at: float) -> Census:
        """Wait until no resources are held for requests, or for a timeout, and return the census."""
        answered_at = time.monotonic()
        await asyncio.to_thread(settled, self._all)
        rest_s = time.monotonic() - answered_at
        await asyncio.sleep(QUIET_S)
        return await asyncio.to_thread(self._look, time.monotonic() - began_at, rest_s)

    def left_keys(self) -> list[str]:
        patterns = ("gammaray:session:*", "gammaray:request:*")
        keys = (key for pattern in patterns for key in self._redis.scan_iter(pattern, count=1000))
        return sorted(key.decode() for key in keys)

    def _look(self, at_s: float, rest_s: float) -> Census:
        processes = self._all()
        figures: Counter[tuple[str, str]] = Counter()
        pids: dict[str, list[int]] = defaultdict(list)
        for (role, pid), holding in census(processes).items():
            pids[role].append(pid)
            figures.update({(role, measure): value for measure, value in holding.items()})
        with httpx.Client(timeout=SCRAPE_TIMEOUT_S) as http:
            for process in processes:
                if process.metrics_address:
                    metrics = http.get(f"http://{process.metrics_address}/metrics").raise_for_status()
                    families = text_string_to_metric_families(metrics.text)
                    samples = [sample for family in families for sample in family.samples]
                    figures[process.role, "series"] += len(samples)
                    (tasks,) = (one.value for one in samples if one.name == "gammaray_tasks")
                    figures[process.role, "tasks"] += tasks
                    # What ended sessions have left fills up to its bounds by design, and not within minutes.
                    name = "gammaray_worker_cache_retained_bytes"
                    retained = (one.value for one in samples if one.name == name)
                    figures[process.role, "rss_mb"] -= sum(retained) / 2**20
        by_role = {role: tuple(sorted(found)) for role, found in pids.items()}
        return Census(at_s, rest_s, {**figures, **self._redis_figures()}, by_role)

    def _all(self) -> list[ProcessStatus]:
        """Return every process: those of the status, with the workers' own reports, and the rest."""
        with Client(self._apis.grpc, api_key=self._apis.key) as client:
            known = [asked(process) for process in client.status()]
        pids = {process.pid for process in known}
        try:
            launcher = psutil.Process(self._launcher_pid)
            family = [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            if process.pid not in pids and (role := self._role(process)):
                known.append(ProcessStatus(role, process.pid, "", "", True, 0))
        return known

    def _role(self, process: psutil.Process) -> str:
        """Return the role of a process in one word, "" for one that has ended."""
        try:
            name, command = process.name(), process.cmdline()
        except psutil.Error:
            return ""
        if process.pid == self._launcher_pid:
            return "launcher"
        if name.startswith("ray::"):
            return re.split("[:.]", name.removeprefix("ray::"))[0]  # what it does at present follows
        scripts = [word for word in command[1:] if word.endswith(".py") or word.startswith("orchestrator.")]
        return Path(scripts[0]).name.removeprefix("orchestrator.") if scripts else name

    def _redis_figures(self) -> dict[tuple[str, str], float]:
        keyspace = self._redis.info("keyspace").get("db0", {"keys": 0, "expires": 0})
        figures = {
            "memory_mb": self._redis.info("memory")["used_memory"] / 2**20,
            "clients": self._redis.info("clients")["connected_clients"],
            "keys": keyspace["keys"],
            "lasting_keys": keyspace["keys"] - keyspace["expires"],
            "running": self._redis.scard("gammaray:running"),
        }
        return {("redis", measure): float(value) for measure, value in figures.items()}
