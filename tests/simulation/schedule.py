"""One schedule: three clients, faults at drawn callbacks, and what must hold whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gammaray import AsyncClient
from gammaray.errors import (
    FailedPreconditionError,
    GammarayError,
    InternalError,
    NotFoundError,
    ResourceExhaustedError,
)
from gammaray.types import Chunk, FinishReason, GammaPolicy, GenerationRequest, SamplingParams
from tests.simulation.cluster import ORCHESTRATORS, SERVE, WORKERS, Cluster
from tests.simulation.loop import Process, Stuck, simulated
from tests.simulation.redis_link import RealRedis
from tests.simulation.tiny_model import plain_tokens

NUM_CLIENTS, NUM_TOKENS, DEADLINE_S = 3, 32, 60.0
CLIENTS = tuple(f"client-{number}" for number in range(NUM_CLIENTS))
MAX_FAULTS = 6
LASTS_S = (0.05, 0.05, 0.5, 0.5, 0.5, 3.0, 3.0, 12.0)
NUM_COMPLETIONS = 8
NUM_PROBED = 8
"""Tokens of the stream that begins after the last fault."""

HORIZON = 2500
"""Callbacks after the clients' start within which faults begin: about as many as a run without faults has."""

PROGRESS_S = 5.0
"""Seconds after the last fault within which every stream must have gone on."""

LOOK_S = 0.1
SETTLE_S = 1.0
REAP_S = 25.0
"""Seconds after which a session without an owner is detached: a lease, and the time between two looks."""

REFUSALS = (
    "READONLY You can't write against a read only replica.",
    "LOADING Redis is loading the dataset in memory",
    "BUSY Redis is busy running a script.",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "NOREPLICAS Not enough good replicas to write.",
)


BREAKING = {
    "kill",
    "pause",
    "drain",
    "block",
    "partition",
    "cut",
    "slow network",
    "proxy dies",
    "client leaves",
}
"""Faults that may lose a release: the worker then keeps the session until it needs its memory."""


MOMENTS = {"kill", "drain", "cut", "client leaves", "rival", "cancel", "delete", "clock step", "failing step"}
"""Faults that do not last."""


@dataclass(frozen=True)
class Fault:
    """A fault.

    Args:
        step: Callback after the clients' start at which it begins.
        kind: A key of `FAULTS`.
        where: Names of processes, or what else the kind needs.
        lasts_s: How long it lasts; 0: it is a moment.
    """

    step: int
    kind: str
    where: tuple[str, ...] = ()
    lasts_s: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.2f} s" if self.lasts_s else ""
        return f"at callback {self.step}: {self.kind} {' '.join(self.where)}{lasts}"


def draw_faults(rng: random.Random) -> list[Fault]:
    """Return the faults of a schedule, in order."""
    return sorted((_draw(rng) for _ in range(rng.randint(1, MAX_FAULTS))), key=lambda fault: fault.step)


def _draw(rng: random.Random) -> Fault:
    kind = rng.choice(list(FAULTS))
    step, lasts_s = rng.randrange(HORIZON), round(rng.choice(LASTS_S) * rng.uniform(0.2, 1.5), 3)
    where: tuple[str, ...] = ()
    if kind in ("kill", "pause"):
        where = (rng.choice(ORCHESTRATORS + WORKERS + (CLIENTS if kind == "pause" else ())),)
    elif kind == "drain":
        where = (rng.choice(ORCHESTRATORS + WORKERS),)
    elif kind in ("slow engine", "failing step"):
        where = (rng.choice(WORKERS),)
    elif kind in ("block", "partition", "cut"):
        one = rng.choice(ORCHESTRATORS)
        pair = [one, rng.choice((*WORKERS, *CLIENTS, "redis"))]
        rng.shuffle(pair)
        where = tuple(pair)
    elif kind == "Redis refuses":
        where = (rng.choice(REFUSALS),)
    elif kind == "clock step":
        where = (str(rng.choice((-60.0, -5.0, 5.0, 20.0, 60.0, 7200.0))),)
    elif kind in ("proxy dies", "client leaves", "cancel", "delete", "rival"):
        where = (rng.choice(CLIENTS),)
    is_moment = kind in MOMENTS
    return Fault(step, kind, where, 0.0 if is_moment else lasts_s)


@dataclass
class Stream:
    """One client's completion.

    Attributes:
        turns: The requests, one after another, with the tokens of plain decoding.
        turn: The turn that runs.
        received: The tokens of the turn that the client has.
        ended: How it ended: a finish reason, or an error's class; empty while it runs.
        error: The error.
        process: The client's process.
        attempts: How often a client process began the turn.
        is_second: Whether it began after another session of its name was deleted.
    """

    turns: list[tuple[GenerationRequest, tuple[int, ...]]]
    turn: int = 0
    received: list[int] = field(default_factory=list)
    ended: str = ""
    error: GammarayError | None = None
    process: Process | None = None
    attempts: int = 0
    is_second: bool = False

    @property
    def name(self) -> str:
        return self.turns[0][0].session_id

    @property
    def expected(self) -> tuple[int, ...]:
        return self.turns[self.turn][1]

    @property
    def is_last(self) -> bool:
        return self.turn + 1 == len(self.turns)


def draw_stream(rng: random.Random, name: str, num_tokens: int = NUM_TOKENS) -> Stream:
    """Return a request out of some, whose expected tokens are computed once."""
    number = rng.randrange(NUM_COMPLETIONS)
    prompt = tuple(random_tokens(number))
    temperature, seed = (0.0, 0.7, 1.0)[number % 3], number + 1
    expected = plain_tokens(prompt, temperature, seed, num_tokens)
    params = SamplingParams(temperature=temperature, seed=seed)
    gamma = rng.choice(
        (GammaPolicy(), GammaPolicy(fixed=0), GammaPolicy(fixed=3), GammaPolicy(fixed=3, max_nodes=6))
    )
    request = GenerationRequest(
        prompt, sampling=params, max_tokens=num_tokens, ignore_eos=True, session_id=name, gamma=gamma
    )
    if rng.random() < 0.7:
        return Stream([(request, expected)])
    half = num_tokens // 2
    first = replace(request, max_tokens=half, keep_cache_s=rng.choice((0.0, 0.5)))
    second = replace(request, prompt=(5, 6, 7), max_tokens=half, turn=1)
    more = plain_tokens((*prompt, *expected[:half], 5, 6, 7), temperature, seed, half)
    return Stream([(first, expected[:half]), (second, more)])


def random_tokens(number: int) -> Sequence[int]:
    """Return prompt `number`; the first ones begin alike, so that workers share their caches."""
    common = [(7 * i) % 251 for i in range(20)]
    return [*common[: 20 if number < 4 else 3], *((number * 31 + i) % 251 for i in range(number + 1))]


@dataclass
class Outcome:
    """What came of a schedule.

    Attributes:
        failure: What did not hold; empty: everything held.
        injected: Number of faults by kind.
        digest: Of all that the clients received, and when: the same for the same seed and faults.
    """

    failure: str = ""
    injected: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    simulated_s: float = 0.0
    digest: str = ""


class Broken(AssertionError):
    """Something did not hold."""


def run_schedule(seed: int, real: RealRedis, faults: Sequence[Fault] | None = None) -> Outcome:
    """Run the schedule of a seed.

    Args:
        seed: Draws everything, the faults included.
        real: A Redis, which is emptied.
        faults: Faults to inject instead of those drawn.
    """
    outcome = Outcome()
    with simulated(seed) as loop:
        start_s = loop.now
        drawn = draw_faults(random.Random(seed))
        run = _Run(Cluster(loop, real), list(drawn if faults is None else faults), outcome)
        try:
            with run.cluster.installed():
                loop.run(run.main())
            if loop.errors:
                raise Broken(f"errors that no one handled: {loop.errors[:3]}")
        except (Broken, Stuck) as error:
            outcome.failure = str(error)
        outcome.steps, outcome.simulated_s = loop.steps, loop.now - start_s
        outcome.digest = run.digest.hexdigest()[:16]
    return outcome


class _Run:
    def __init__(self, cluster: Cluster, faults: list[Fault], outcome: Outcome) -> None:
        self.cluster, self.loop, self.rng = cluster, cluster.loop, cluster.loop.rng
        self.faults, self.outcome = faults, outcome
        self.digest = hashlib.sha256()
        self.streams = {name: draw_stream(self.rng, f"s-{name}") for name in CLIENTS}
        self.cancelled: set[str] = set()  # sessions that another client cancelled
        self.deleted: set[str] = set()  # or deleted
        self.contested: set[str] = set()  # sessions of which another client may become the owner
        self.has_lost_writes = self.was_full = False
        self.over_at = 0.0  # when the last fault ends
        self.failures: list[str] = []
        self._epochs: dict[bytes, int] = {}
        self._owners: dict[tuple[bytes, int], Process] = {}
        cluster.network.on_answer = self._check_answer
        cluster.redis.on_commit = self._check_commit

    async def main(self) -> None:
        cluster = self.cluster
        for name in WORKERS + ORCHESTRATORS:
            cluster.start(name)
        await cluster.until_ready()
        for name in CLIENTS:
            self.start_client(name)
        base = self.loop.steps
        for fault in self.faults:
            self.loop.when_step(base + fault.step, lambda fault=fault: self._inject(fault))
        deadline = self.loop.now + DEADLINE_S + 5.0
        await self._until(lambda: not self._has_faults_left, deadline)
        await self._check_progress()
        if not await self._until(lambda: not self._running, deadline):
            raise Broken(f"no end within the deadline: {self._running}")
        self._check_ends()
        await asyncio.sleep(SETTLE_S)
        self._check_leaks()
        if self.rng.random() < 0.05:
            await asyncio.sleep(REAP_S)
            self._check_links()
            if left := self.cluster.running_sessions():
                self.fail(f"sessions whose owners died count as running: {sorted(left)}")
        self._raise()

    async def _until(self, holds: Callable[[], bool], deadline: float) -> bool:
        """Wait until something holds; return whether it does before the deadline."""
        while not (is_so := holds()) and self.loop.now < deadline:
            await asyncio.sleep(LOOK_S)
            self._raise()
        return is_so

    def fail(self, what: str) -> None:
        self.failures.append(f"{what} (callback {self.loop.steps})")

    def _raise(self) -> None:
        if self.failures:
            raise Broken("; ".join(self.failures[:3]))

    def _inject(self, fault: Fault) -> None:
        if "probe" in self.streams:
            return  # the streams ended before it
        self.outcome.injected[fault.kind] += 1
        end = FAULTS[fault.kind](self, fault)
        self.over_at = max(self.over_at, self.loop.now + fault.lasts_s)
        if end is not None:
            self.loop.call_later(fault.lasts_s, end)

    # Clients

    def start_client(self, name: str) -> None:
        stream = self.streams[name]
        stream.process = self.loop.process(name)
        self.loop.create_task(self._consume(stream), context=stream.process.context)

    async def _consume(self, stream: Stream) -> None:
        try:
            async with AsyncClient(SERVE) as client:
                while not stream.ended:
                    await self._consume_turn(stream, client)
        except GammarayError as error:
            stream.ended, stream.error = type(error).__name__, error
        self.digest.update(f"{stream.name} {stream.ended} {self.loop.now}".encode())

    async def _consume_turn(self, stream: Stream, client: AsyncClient) -> None:
        request = stream.turns[stream.turn][0]
        if stream.attempts:
            request = replace(request, resume_from=len(stream.received))
        stream.attempts += 1
        async for chunk in client.generate(request, timeout_s=DEADLINE_S):
            self._take(stream, chunk)
        if not stream.ended:
            stream.turn, stream.attempts, stream.received = stream.turn + 1, 0, []

    def _take(self, stream: Stream, chunk: Chunk) -> None:
        start, tokens = len(stream.received), [token.token_id for token in chunk.tokens]
        if chunk.offset != start:
            self.fail(f"{stream.name}: a chunk at {chunk.offset}, the client has {start} tokens")
        stream.received += tokens
        self.digest.update(f"{stream.name} {tokens} {self.loop.now}".encode())
        is_deleted = stream.name in self.deleted and not stream.is_second  # it may resume the second one
        if tuple(stream.received) != stream.expected[: len(stream.received)] and not is_deleted:
            self.fail(f"{stream.name}: other tokens than plain decoding's from {start} on")
        reason = chunk.finish_reason
        if reason is not None and (stream.is_last or reason is not FinishReason.LENGTH):
            stream.ended = reason.value

    # What must hold

    def _check_answer(self, process: Process, path: str, answer: Any) -> None:
        """Check that tokens are stored when an orchestrator sends them."""
        if not path.endswith("/Generate") or self.has_lost_writes or not answer.tokens:
            return
        if answer.session_id in self.deleted:
            return
        end = answer.offset + len(answer.tokens)
        turn, stored = self.cluster.stored_tokens(answer.session_id)
        if stored < end and turn == answer.turn:
            self.fail(f"{answer.session_id}: {process} sent {end} tokens, {stored} are stored")

    def _check_commit(self, process: Process, key: bytes, epoch: int) -> None:
        """Check that one owner at a time appends to a session."""
        newest = self._epochs[key] = max(epoch, self._epochs.get(key, 0))
        owner = self._owners.setdefault((key, epoch), process)
        if self.has_lost_writes:
            return
        if epoch < newest:
            self.fail(f"{key.decode()}: {process} appended with epoch {epoch} after {newest}")
        if owner is not process:
            self.fail(f"{key.decode()}: {process} and {owner} appended with the same epoch")

    async def _check_progress(self) -> None:
        """Check that after the last fault every stream goes on, and that a new one runs."""
        counts = {name: len(stream.received) for name, stream in self.streams.items()}
        self.streams["probe"] = draw_stream(self.rng, "s-probe", NUM_PROBED)
        self.start_client("probe")
        if await self._until(lambda: not self._running, self.loop.now + PROGRESS_S):
            return
        for name, stream in self.streams.items():
            if not stream.ended and len(stream.received) == counts.get(name, 0):
                self.fail(f"{stream.name}: no progress within {PROGRESS_S:g} s after the last fault")

    @property
    def _running(self) -> list[str]:
        return [stream.name for stream in self.streams.values() if not stream.ended]

    @property
    def _has_faults_left(self) -> bool:
        if self.loop.now < self.over_at:
            return True
        return bool(self._running) and self.outcome.injected.total() < len(self.faults)

    def _check_ends(self) -> None:
        for stream in self.streams.values():
            if stream.ended == FinishReason.LENGTH.value:
                if len(stream.received) != len(stream.expected):
                    self.fail(
                        f"{stream.name}: ended with {len(stream.received)} of {len(stream.expected)} tokens"
                    )
            elif not self._is_excused(stream):
                self.fail(f"{stream.name}: ended with {stream.ended}: {stream.error}")

    def _is_excused(self, stream: Stream) -> bool:
        """Whether a stream may end without all its tokens."""
        error, allowed = stream.error, set[type[GammarayError]]()
        if stream.name in self.deleted or self.has_lost_writes:
            allowed |= {FailedPreconditionError, NotFoundError, InternalError}
        if stream.name in self.contested:
            allowed |= {FailedPreconditionError}
        if self.was_full or self.cluster.max_requests == 1:
            allowed |= {ResourceExhaustedError}
        if "planted" in str(error) and not stream.received:
            allowed |= {InternalError}  # a step that fails is a bug of a worker; only a begun stream goes on
        is_cancelled = stream.ended == FinishReason.CANCELLED.value and stream.name in self.cancelled
        return is_cancelled or isinstance(error, tuple(allowed))

    def _check_links(self) -> None:
        for name, replica in self.cluster.replicas.items():
            if replica.orchestrator is None:
                self.fail(f"{name} does not start")
                continue
            fleet = replica.orchestrator.fleet
            for worker in self.cluster.workers.values():
                links = (fleet.drafts if worker.role == "draft" else fleet.targets).links
                if worker.address not in links or not links[worker.address].is_up:
                    self.fail(f"{name} is not connected to {worker.address}")

    def _check_leaks(self) -> None:
        for name, replica in self.cluster.replicas.items():
            orchestrator = replica.orchestrator
            if orchestrator is None or not replica.process.is_alive:
                continue
            places = orchestrator.admission.num_running, orchestrator.admission.num_waiting
            if places != (0, 0):
                self.fail(f"{name}: {places} requests run and wait after all have ended")
            for pool in (orchestrator.fleet.targets, orchestrator.fleet.drafts):
                for link in pool.links.values():
                    if link.pending or link.sessions or link.listeners:
                        self.fail(f"{name}: calls or sessions are left on {link.address}")
        left = [
            task.get_name()
            for process in self.loop.processes
            for task in process.tasks
            if task.get_name().startswith("cycles of") and not task.done()
        ]
        if left:
            self.fail(f"tasks are left: {left}")
        failed = {stream.name for stream in self.streams.values() if stream.error is not None}
        running = self.cluster.running_sessions() - self.deleted - self.cancelled - failed
        if running and not self.has_lost_writes:
            self.fail(f"sessions count as running after their end: {sorted(running)}")
        for name, worker in self.cluster.workers.items():
            if not worker.process.is_alive:
                continue
            if worker.streams.num_ids or worker.engine.scheduler.num_queued:
                self.fail(f"{name}: blocks are left")
            if not self.outcome.injected.keys() & BREAKING and (
                left := list(worker.engine.scheduler.sessions)
            ):
                self.fail(f"{name}: sessions are left: {left}")


def _kill(run: _Run, fault: Fault) -> None:
    run.cluster.kill(fault.where[0])
    run.over_at = max(run.over_at, run.loop.now + 1.0)


def _drain(run: _Run, fault: Fault) -> None:
    run.cluster.drain(fault.where[0])
    run.over_at = max(run.over_at, run.loop.now + 1.0)


def _pause(run: _Run, fault: Fault) -> Callable[[], None] | None:
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


def _block(run: _Run, fault: Fault) -> Callable[[], None]:
    one, other = fault.where
    pairs = {(one, other)} | ({(other, one)} if fault.kind == "partition" else set())
    run.cluster.network.blocked |= pairs
    run.cluster.network.changed()

    def heal() -> None:
        run.cluster.network.blocked -= pairs
        run.cluster.network.changed()
        run.cluster.redis.flush()

    return heal


def _cut(run: _Run, fault: Fault) -> None:
    if "redis" in fault.where:
        run.cluster.redis.cut()
    for connection in run.cluster.network.connections:
        if {connection.client.name, connection.server.process.name} == set(fault.where):
            connection.reset("Connection reset by peer")


def _slow_network(run: _Run, fault: Fault) -> Callable[[], None]:
    run.cluster.network.latency_s = (1e-3, 0.15)

    def heal() -> None:
        run.cluster.network.latency_s = (1e-4, 2e-3)

    return heal


def _slow_engine(run: _Run, fault: Fault) -> Callable[[], None]:
    engine = run.cluster.workers[fault.where[0]].engine
    engine.step_s = (0.05, 0.5)

    def heal() -> None:
        engine.step_s = run.cluster.step_s

    return heal


def _failing_step(run: _Run, fault: Fault) -> None:
    run.cluster.workers[fault.where[0]].engine.fails_next = True


def _redis_restarts(run: _Run, fault: Fault) -> Callable[[], None]:
    redis = run.cluster.redis
    redis.is_up = False
    redis.cut()

    def heal() -> None:
        redis.is_up = True

    return heal


def _redis_stalls(run: _Run, fault: Fault) -> None:
    run.cluster.redis.busy_until = run.loop.now + fault.lasts_s


def _redis_refuses(run: _Run, fault: Fault) -> Callable[[], None]:
    redis = run.cluster.redis
    redis.refusal = fault.where[0]
    run.was_full |= redis.refusal.startswith("OOM")

    def heal() -> None:
        redis.refusal = ""

    return heal


def _redis_loses_writes(run: _Run, fault: Fault) -> Callable[[], None]:
    redis = run.cluster.redis
    state = redis.real.dump()

    def fail_over() -> None:
        run.has_lost_writes = True
        redis.real.restore(state)
        redis.cut()

    return fail_over


def _clock_step(run: _Run, fault: Fault) -> None:
    run.cluster.redis.clock_offset_s += float(fault.where[0])
    run.has_lost_writes |= float(fault.where[0]) > 3600  # sessions expire
    run.cluster.redis.set_clock()


def _client_leaves(run: _Run, fault: Fault) -> None:
    stream = run.streams[fault.where[0]]
    if stream.ended or stream.process is None or not stream.process.is_alive:
        return
    run.loop.kill(stream.process)
    run.cluster.network.end(stream.process)
    run.loop.call_later(run.rng.uniform(0.0, 0.5), run.start_client, fault.where[0])


def _proxy_dies(run: _Run, fault: Fault) -> None:
    """The client notices at once, the orchestrator only when the fault ends."""
    process = run.streams[fault.where[0]].process
    for connection in run.cluster.network.connections:
        if connection.client is process:
            connection.reset("Socket closed", fault.lasts_s)


def _rival(run: _Run, fault: Fault) -> None:
    """Another client resumes the session from its beginning: one of the two loses it."""
    stream = run.streams[fault.where[0]]
    run.contested.add(stream.name)
    key = f"rival of {fault.where[0]}"
    if not stream.ended and stream.attempts and key not in run.streams:
        run.streams[key] = Stream([stream.turns[stream.turn]], attempts=1)
        run.start_client(key)


def _end_session(run: _Run, fault: Fault) -> None:
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
                again = f"another {fault.where[0]}'s"
                run.streams[again] = Stream(draw_stream(run.rng, stream.name).turns, is_second=True)
                run.start_client(again)

    run.loop.create_task(call(), context=process.context)


FAULTS: dict[str, Callable[[_Run, Fault], Callable[[], None] | None]] = {
    "kill": _kill,
    "drain": _drain,
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
