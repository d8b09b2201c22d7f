"""The faults of a schedule: how they are drawn, begin and end."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from gammaray import AsyncClient
from gammaray.errors import GammarayError
from tests.simulation.cluster import ORCHESTRATORS, SERVE, WORKERS
from tests.simulation.streams import CLIENTS, Stream, draw_stream

if TYPE_CHECKING:
    from tests.simulation.schedule import Run

MAX_FAULTS = 6
LASTS_S = (0.05, 0.05, 0.5, 0.5, 0.5, 3.0, 3.0, 12.0)
HORIZON = 2000
"""Callbacks after the clients' start within which faults begin: about as many as a run without faults has."""

REFUSALS = (
    "READONLY You can't write against a read only replica.",
    "LOADING Redis is loading the dataset in memory",
    "BUSY Redis is busy running a script.",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "NOREPLICAS Not enough good replicas to write.",
)

PLACES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("kill", "drain"), ORCHESTRATORS + WORKERS),
    "pause": ORCHESTRATORS + WORKERS + CLIENTS,
    **dict.fromkeys(("slow engine", "failing step"), WORKERS),
    "Redis refuses": REFUSALS,
    "clock step": ("-60", "-5", "5", "20", "60", "7200"),
    **dict.fromkeys(("proxy dies", "client leaves", "cancel", "delete", "rival"), CLIENTS),
}
"""Out of what one is drawn, by kind."""

MOMENTS = {"kill", "drain", "cut", "client leaves", "rival", "cancel", "delete", "clock step", "failing step"}
"""Faults that do not last."""


@dataclass(frozen=True)
class Fault:
    step: int  # callback after the clients' start at which it begins
    kind: str  # a key of `FAULTS`
    where: tuple[str, ...] = ()  # names of processes, or what else the kind needs
    lasts_s: float = 0.0  # how long it lasts; 0: it is a moment

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.2f} s" if self.lasts_s else ""
        return f"at callback {self.step}: {self.kind} {' '.join(self.where)}{lasts}"


def draw_faults(rng: random.Random) -> list[Fault]:
    return sorted((_draw(rng) for _ in range(rng.randint(1, MAX_FAULTS))), key=lambda fault: fault.step)


def _draw(rng: random.Random) -> Fault:
    kind = rng.choice(list(FAULTS))
    step, lasts_s = rng.randrange(HORIZON), round(rng.choice(LASTS_S) * rng.uniform(0.2, 1.5), 3)
    where = [rng.choice(PLACES[kind])] if kind in PLACES else []
    if kind in ("block", "partition", "cut"):
        where = [rng.choice(ORCHESTRATORS), rng.choice((*WORKERS, *CLIENTS, "redis"))]
        rng.shuffle(where)
    return Fault(step, kind, tuple(where), 0.0 if kind in MOMENTS else lasts_s)


def _end_process(run: Run, fault: Fault) -> None:
    end = run.cluster.kill if fault.kind == "kill" else run.cluster.drain
    end(fault.where[0])
    run.over_at = max(run.over_at, run.loop.now + 1.0)


def _pause(run: Run, fault: Fault) -> Callable[[], None] | None:
    name = fault.where[0]
    one = run.cluster.running(name)
    process = one.process if one is not None else run.streams[name].process if name in run.streams else None
    if process is None:
        return None
    run.loop.pause(process, is_paused=True)
    run.cluster.network.changed()

    def resume() -> None:
        run.loop.pause(process, is_paused=False)
        run.cluster.network.changed()

    return resume


def _block(run: Run, fault: Fault) -> Callable[[], None]:
    one, other = fault.where
    pairs = {(one, other)} | ({(other, one)} if fault.kind == "partition" else set())
    run.cluster.network.blocked |= pairs
    run.cluster.network.changed()

    def heal() -> None:
        run.cluster.network.blocked -= pairs
        run.cluster.network.changed()
        run.cluster.redis.flush()

    return heal


def _cut(run: Run, fault: Fault) -> None:
    if "redis" in fault.where:
        run.cluster.redis.cut()
    for connection in run.cluster.network.connections:
        if {connection.client.name, connection.server.process.name} == set(fault.where):
            connection.reset("Connection reset by peer")


def _slow_network(run: Run, fault: Fault) -> Callable[[], None]:
    network, usual_s = run.cluster.network, (1e-4, 2e-3)
    network.latency_s = (1e-3, 0.15)
    return partial(setattr, network, "latency_s", usual_s)


def _slow_engine(run: Run, fault: Fault) -> Callable[[], None]:
    engine = run.cluster.workers[fault.where[0]].engine
    engine.step_s = (0.05, 0.5)
    return partial(setattr, engine, "step_s", run.cluster.step_s)


def _failing_step(run: Run, fault: Fault) -> None:
    run.cluster.workers[fault.where[0]].engine.fails_next = True


def _redis_restarts(run: Run, fault: Fault) -> Callable[[], None]:
    redis = run.cluster.redis
    redis.is_up = False
    redis.cut()
    return partial(setattr, redis, "is_up", True)


def _redis_stalls(run: Run, fault: Fault) -> None:
    run.cluster.redis.busy_until = run.loop.now + fault.lasts_s


def _redis_refuses(run: Run, fault: Fault) -> Callable[[], None]:
    redis = run.cluster.redis
    redis.refusal = fault.where[0]
    run.was_full |= redis.refusal.startswith("OOM")
    return partial(setattr, redis, "refusal", "")


def _redis_loses_writes(run: Run, fault: Fault) -> Callable[[], None]:
    redis = run.cluster.redis
    state = redis.real.dump()

    def fail_over() -> None:
        run.has_lost_writes = True
        redis.real.restore(state)
        redis.cut()

    return fail_over


def _clock_step(run: Run, fault: Fault) -> None:
    run.cluster.redis.clock_offset_s += float(fault.where[0])
    run.has_lost_writes |= float(fault.where[0]) > 3600  # sessions expire
    run.cluster.redis.set_clock()


def _client_leaves(run: Run, fault: Fault) -> None:
    stream = run.streams[fault.where[0]]
    if stream.ended or stream.process is None or not stream.process.is_alive:
        return
    run.loop.kill(stream.process)
    run.cluster.network.end(stream.process)
    run.loop.call_later(run.rng.uniform(0.0, 0.5), run.start_client, fault.where[0])


def _proxy_dies(run: Run, fault: Fault) -> None:
    """The client notices at once, the orchestrator only when the fault ends."""
    process = run.streams[fault.where[0]].process
    for connection in run.cluster.network.connections:
        if connection.client is process:
            connection.reset("Socket closed", fault.lasts_s)


def _rival(run: Run, fault: Fault) -> None:
    """Another client resumes the session from its beginning: one of the two loses it."""
    stream = run.streams[fault.where[0]]
    run.contested.add(stream.name)
    key = f"rival of {fault.where[0]}"
    if not stream.ended and stream.attempts and key not in run.streams:
        run.streams[key] = Stream([stream.turns[stream.turn]], attempts=1)
        run.start_client(key)


def _end_session(run: Run, fault: Fault) -> None:
    stream = run.streams[fault.where[0]]
    (run.cancelled if fault.kind == "cancel" else run.deleted).add(stream.name)
    process = run.loop.process(f"another {fault.where[0]}")

    async def call() -> None:
        async with AsyncClient(SERVE) as client:
            with contextlib.suppress(GammarayError):
                if fault.kind == "cancel":
                    await client.cancel(stream.name)
                    return
                await client.delete_session(stream.name)
                again = f"another {fault.where[0]}'s {len(run.streams)}"  # it may be deleted twice
                run.streams[again] = Stream(draw_stream(run.rng, stream.name).turns, is_second=True)
                run.start_client(again)

    run.loop.create_task(call(), context=process.context)


FAULTS: dict[str, Callable[[Run, Fault], Callable[[], None] | None]] = {
    "kill": _end_process,
    "drain": _end_process,
    "pause": _pause,
    "block": _block,
    "partition": _block,
    "cut": _cut,
    "slow network": _slow_network,
    "slow engine": _slow_engine,
    "failing step": _failing_step,
    "Redis restarts": _redis_restarts,
    "Redis stalls": _redis_stalls,
    "Redis refuses": _redis_refuses,
    "Redis loses writes": _redis_loses_writes,
    "clock step": _clock_step,
    "proxy dies": _proxy_dies,
    "client leaves": _client_leaves,
    "rival": _rival,
    "cancel": _end_session,
    "delete": _end_session,
}
"""Each begins a fault, and returns what ends it."""
