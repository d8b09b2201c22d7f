"""A run: load, strikes in an order given by the seed, and the outcome of the streams."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from gammaray import RetryPolicy
from tests.chaos.chaos_clusters import Scene
from tests.chaos.chaos_drafters import unused
from tests.chaos.chaos_redis import ChaosRedis
from tests.chaos.load import Load, Tally, asks, reference, streams
from tests.chaos.pauses import SETTLE_S, Event, pause_s, usual_pause_s
from tests.chaos.suspension import suspend_owner
from tests.chaos.victims import ROLES, Action, Blow, Strike, find, plan, strike
from tests.chaos.watch import Watch

CALM_S = 1.0
END_TIMEOUT_S = 90.0
SECOND_TIMEOUT_S = 60.0
"""How long a strike that takes two orchestrators waits for the second one."""

REPLICATED = ("draft", "target", "orchestrator")
"""Roles with two processes: strikes at the only one that serves have a row of their own."""

UNTIMED = (Action.KILL, Action.LOAD, Action.SUSPEND)
REDIS_STRIKES: dict[Action, Callable[[ChaosRedis, float], None]] = {
    Action.DEMOTE: ChaosRedis.demote,
    Action.FILL: ChaosRedis.fill,
    Action.OCCUPY: ChaosRedis.occupy,
    Action.LOAD: lambda redis, _: redis.kill_full(),
}


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Args:
        seconds: Duration of the strikes.
        seed: Seed of their order, pauses and choices.
        streams: Concurrent streams.
        max_tokens: Tokens of each completion.
        pause_s: Bounds of the seconds from the recovery of all streams to the next strike.
        stop_s: Bounds of the seconds that a process is stopped.
        max_strikes: Number of strikes after which the run ends earlier.
        roles: Roles to strike.
        move_timeout_s: Longest wait for the recovery of all streams before the next strike.
        resume_s: Time for which a client tries to resume a stream.
    """

    seconds: float = 300.0
    seed: int = 0
    streams: int = 18
    max_tokens: int = 400
    pause_s: tuple[float, float] = (0.1, 1.0)
    stop_s: tuple[float, float] = (0.5, 4.0)
    max_strikes: int = 10_000
    roles: tuple[str, ...] = ROLES
    move_timeout_s: float = 10.0
    resume_s: float = RetryPolicy.resume_s


@dataclass
class Outcome:
    """Outcome of a run."""

    tally: Tally
    events: list[Event] = field(default_factory=list)
    usual_pause_s: float = 0.0
    seconds: float = 0.0
    unused: list[str] = field(default_factory=list)

    @property
    def num_kills(self) -> int:
        return sum(len(event.killed) for event in self.events)

    @property
    def is_clean(self) -> bool:
        tally = self.tally
        return not tally.lost and not tally.wrong and not self.unused and tally.finished > 0


async def run(scene: Scene, options: Options, say: Callable[[str], None]) -> Outcome:
    cluster, wanted = scene.cluster, asks(options.streams, options.max_tokens)
    say(f"{len(wanted)} streams of {options.max_tokens} tokens, first plain and undisturbed ...")
    expected = await reference(cluster.grpc, wanted)
    drafted = streams(wanted, scene.ways)
    load = Load(cluster.grpc, drafted, expected, RetryPolicy(resume_s=options.resume_s))
    watch = Watch(cluster.grpc)
    watching = asyncio.create_task(watch.run())
    outcome = Outcome(load.tally)
    load.start()
    try:
        await _until_all_move(load, time.monotonic(), options.move_timeout_s)
        calm = time.monotonic()
        await asyncio.sleep(2.0)
        outcome.usual_pause_s = max(usual_pause_s(load.arrivals, calm + 0.1 * step) for step in range(10))
        start = time.monotonic()
        for blows in plan(options.seed, options.pause_s, options.stop_s, options.roles):
            await asyncio.sleep(blows.after_s)
            if time.monotonic() - start > options.seconds or len(outcome.events) >= options.max_strikes:
                break
            event = await _carry_out(scene, blows, load.tally, watch)
            event.is_calm = load.all_moved_between(event.at - CALM_S, event.at)
            outcome.events.append(event)
            await _until_all_move(load, event.at + max(SETTLE_S, event.stop_s), options.move_timeout_s)
            say(f"{event.at - start:6.1f} s  {_describe(blows)}: {_sums(load)}")
        outcome.seconds = time.monotonic() - start
        await load.end(max(END_TIMEOUT_S, options.resume_s))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    starts = [event.at for event in outcome.events]
    for event, following in zip(outcome.events, [*starts[1:], math.inf], strict=True):
        event.pauses_s = tuple(pause_s(times, event.at, following) for times in load.arrivals)
        back = [watch.back_at(role, event.at) for role in event.killed]
        event.back_at = max((at for at in back if at is not None), default=None) if None not in back else None
    outcome.unused = unused({stream.way: None for stream in drafted}, load.tally.cycles)
    return outcome


async def _carry_out(scene: Scene, blows: Strike, tally: Tally, watch: Watch) -> Event:
    """Strike, and wait until stopped processes continue."""
    cluster, redis = scene.cluster, scene.redis

    def look() -> list[list[psutil.Process]]:
        return [find(blow.role, cluster.launcher.pid, redis.server.pid) for blow in blows.blows]

    (first, *_) = blows.blows
    found = await asyncio.to_thread(look)
    deadline = time.monotonic() + SECOND_TIMEOUT_S
    while first.action is Action.SUSPEND and len(found[0]) < 2 and time.monotonic() < deadline:
        await asyncio.sleep(0.2)  # its sessions can end elsewhere only if there is another one
        found = await asyncio.to_thread(look)
    event = Event(blows.label, time.monotonic())
    if first.action in REDIS_STRIKES:
        await asyncio.to_thread(REDIS_STRIKES[first.action], redis, first.stop_s)
        event.stop_s = 0.0 if first.action is Action.LOAD else first.stop_s
        return event
    if first.action is Action.SUSPEND:
        try:
            tally.wrong += await suspend_owner(cluster, lambda: strike(found[0], first))
        except AssertionError as error:
            tally.lost.append(str(error))
        event.stop_s = time.monotonic() - event.at
        return event
    struck: list[tuple[Blow, psutil.Process]] = []
    for blow, processes in zip(blows.blows, found, strict=True):
        if (victim := strike(processes, blow)) is not None:
            struck.append((blow, victim))
    if len(struck) == len(blows.blows) == 1 and first.role in REPLICATED:
        others = {process.pid for process in found[0]} - {struck[0][1].pid}
        if not others & watch.serving(first.role):  # another one may be starting
            event.label += ", the only one that served"
    stopped = sorted(
        ((blow.stop_s, victim) for blow, victim in struck if blow.action is not Action.KILL),
        key=lambda pair: pair[0],
    )
    for stop_s, victim in stopped:
        await asyncio.sleep(max(0.0, event.at + stop_s - time.monotonic()))
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have been killed meanwhile
            victim.resume()
        event.stop_s = stop_s
    event.killed = tuple(blow.role for blow, _ in struck if blow.action is Action.KILL)
    return event


async def _until_all_move(load: Load, moment: float, timeout_s: float) -> None:
    """Wait until every stream has received tokens since a time, or the timeout passes."""
    deadline = time.monotonic() + timeout_s
    while not load.all_moved_since(moment) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def _describe(blows: Strike) -> str:
    return ", ".join(
        f"{blow.role} {blow.action.value}" + ("" if blow.action in UNTIMED else f" {blow.stop_s:.1f} s")
        for blow in blows.blows
    )


def _sums(load: Load) -> str:
    tally = load.tally
    return f"{tally.finished} finished, {len(tally.lost)} lost, {len(tally.wrong)} wrong"
