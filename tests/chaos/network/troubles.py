"""What the network, Redis, disks, clocks and memory do to a cluster in a `--network` run."""

import contextlib
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from tests.chaos.network.links import CLIENTS, FAULTS, Fault, Link
from tests.chaos.network.network_redis import REPLICAS, SENTINEL, NetworkRedis, full
from tests.chaos.stage import Stage, Trouble
from tests.chaos.strikes import REPLICATED, Blow, strike

PARTITION = Fault("partition", stalls=True)
STALE_S = 4.0
"""How long the old primary still takes writes after its replica was promoted."""

KILL_S = 20.0
"""Until Ray Serve has replaced a process, mostly."""

MEMORY_LEFT = 8 * 2**20


def _of_links(name: str, fault: Fault, links: Callable[[Stage], list[Link]], *sources: str) -> Trouble:
    seconds = 3.0 if fault.is_cut else 5.0
    return Trouble(
        f"{name}: {fault.name}", seconds, lambda stage: stage.network.faulty(links(stage), fault, *sources)
    )


def troubles(stage: Stage) -> list[Trouble]:
    """Return all that this machine and the stage can do."""
    found = []
    for fault in FAULTS:
        found += [
            _of_links("client to gRPC", fault, lambda stage: [stage.apis["grpc"]]),
            _of_links("client to HTTP", fault, lambda stage: [stage.apis["http"]]),
            _of_links("to one target", fault, lambda stage: stage.network.serving("target")[:1]),
            _of_links("to one draft", fault, lambda stage: stage.network.serving("draft")[:1]),
        ]
    found += [
        _of_links("to all targets", PARTITION, lambda stage: stage.network.serving("target")),
        _of_links("to all drafts", PARTITION, lambda stage: stage.network.serving("draft")),
        Trouble("target: out of memory", 4.0, lambda stage: _little_memory(stage, "target")),
        Trouble("draft: out of memory", 4.0, lambda stage: _little_memory(stage, "draft")),
    ]
    found += [strike(Blow(role), seconds=KILL_S, name=f"{role}: one of two killed") for role in REPLICATED]
    if (disk := stage.disk) is not None:
        found.append(Trouble("cluster's files: disk full", 6.0, lambda _: full(disk)))
    return found + _of_redis(stage.redis) if isinstance(stage.redis, NetworkRedis) else found


def _of_redis(redis: NetworkRedis) -> list[Trouble]:
    found = [_of_links("to Redis", fault, lambda _: redis.links, CLIENTS) for fault in FAULTS]
    found += [
        _of_links("to Sentinel", PARTITION, lambda _: [redis.sentinel]),
        Trouble("Redis: failover that loses writes", STALE_S, lambda stage: _failover(stage, redis)),
        Trouble("Redis: failover, min-replicas-to-write 1", STALE_S, lambda stage: _guarded(stage, redis)),
        Trouble("Redis: primary killed", 8.0, lambda _: redis.killed()),
        Trouble("Redis: maxmemory, noeviction", 4.0, lambda _: redis.out_of_memory()),
        Trouble("Redis: clock + 2 min", 4.0, lambda _: redis.other_clock(120)),
        Trouble("Redis: clock - 2 min", 4.0, lambda _: redis.other_clock(-120)),
        Trouble("Redis: clock + 2 h", 4.0, lambda _: redis.other_clock(7200)),
    ]
    if (disk := redis.disk) is not None:
        found.append(Trouble("Redis: disk full", 4.0, lambda _: redis.out_of_disk(disk)))
    return found


@contextmanager
def _failover(stage: Stage, redis: NetworkRedis) -> Iterator[None]:
    """Part the primary and its clients from its replica and Sentinel, which promotes the replica."""
    redis.wait_until_replicated()
    primary = redis.primary()
    with stage.network.faulty([primary], PARTITION, SENTINEL, REPLICAS):
        redis.wait_for_failover(primary)
        yield
    redis.wait_until_replicated()  # the old primary follows the new one: its writes are gone


@contextmanager
def _guarded(stage: Stage, redis: NetworkRedis) -> Iterator[None]:
    redis.set_min_replicas(1, max_lag_s=1)
    try:
        with _failover(stage, redis):
            yield
    finally:
        redis.set_min_replicas(0, max_lag_s=10)


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
