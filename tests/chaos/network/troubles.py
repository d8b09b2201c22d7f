"""What the network, Redis, disks and memory do to a cluster in a `--network` run."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import redis

from tests.chaos.network.links import FAULTS, Fault, Link
from tests.chaos.stage import Stage, Trouble
from tests.chaos.strikes import REPLICATED, Blow, strike

PARTITION = Fault("partition", stalls=True)
KILL_S = 20.0
"""Until Ray Serve has replaced a process, mostly."""

MEMORY_LEFT = 8 * 2**20


def _of_links(name: str, fault: Fault, links: Callable[[Stage], list[Link]]) -> Trouble:
    seconds = 3.0 if fault.is_cut else 5.0
    return Trouble(f"{name}: {fault.name}", seconds, lambda stage: stage.network.faulty(links(stage), fault))


def troubles(stage: Stage) -> list[Trouble]:
    """Return all that this machine and the stage can do."""
    found = []
    for fault in FAULTS:
        found += [
            _of_links("client to gRPC", fault, lambda stage: [stage.apis["grpc"]]),
            _of_links("client to HTTP", fault, lambda stage: [stage.apis["http"]]),
            _of_links("to one target", fault, lambda stage: stage.network.serving("target")[:1]),
            _of_links("to one draft", fault, lambda stage: stage.network.serving("draft")[:1]),
            _of_links("to Redis", fault, lambda stage: [stage.redis]),
        ]
    found += [
        _of_links("to all targets", PARTITION, lambda stage: stage.network.serving("target")),
        _of_links("to all drafts", PARTITION, lambda stage: stage.network.serving("draft")),
        Trouble("Redis: maxmemory, noeviction", 4.0, _redis_is_full),
        Trouble("target: out of memory", 4.0, lambda stage: _little_memory(stage, "target")),
        Trouble("draft: out of memory", 4.0, lambda stage: _little_memory(stage, "draft")),
    ]
    found += [strike(Blow(role), seconds=KILL_S, name=f"{role}: one of two killed") for role in REPLICATED]
    if (disk := stage.disk) is not None:
        found.append(Trouble("cluster's files: disk full", 6.0, lambda _: full(disk)))
    return found


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fill a file system to the last block, and free it at the end."""
    filler = disk / "filler"
    try:
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass
        yield
    finally:
        filler.unlink(missing_ok=True)


@contextmanager
def _redis_is_full(stage: Stage) -> Iterator[None]:
    """Limit the memory to what is used: writes are refused, nothing is evicted."""
    with redis.Redis.from_url(stage.server.url) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"])
        try:
            yield
        finally:
            client.config_set("maxmemory", 0)


@contextmanager
def _little_memory(stage: Stage, role: str) -> Iterator[None]:
    """Limit the address space of one worker to what it has, and a little more (`ulimit -v`)."""
    victim = stage.find(role)[0]
    before = victim.rlimit(resource.RLIMIT_AS)
    victim.rlimit(resource.RLIMIT_AS, (victim.memory_info().vms + MEMORY_LEFT, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.rlimit(resource.RLIMIT_AS, before)
