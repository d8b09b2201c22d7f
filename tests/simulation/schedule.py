"""One schedule: three clients, faults at drawn callbacks, and what must hold whatever happens."""

import asyncio
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
    UnavailableError,
)
from gammaray.types import Chunk, FinishReason
from tests.simulation.cluster import ORCHESTRATORS, SERVE, WORKERS, Cluster
from tests.simulation.faults import FAULTS, Fault, draw_faults
from tests.simulation.loop import Process, Stuck, simulated
from tests.simulation.redis_link import RealRedis
from tests.simulation.streams import CLIENTS, Stream, draw_stream

DEADLINE_S = 60.0
NUM_PROBED = 8
"""Tokens of the stream that begins after the last fault."""

PROGRESS_S = 5.0
"""Seconds after the last fault within which every stream must have gone on."""

LOOK_S = 0.1
SETTLE_S = 3.0  # a turn that its client left goes on to its end
REAP_S = 25.0
"""Seconds after which a session without an owner is detached: a lease, and the time between two looks."""

BREAKING = {
    *("kill", "pause", "drain", "proxy dies", "client leaves"),
    *("block", "partition", "cut", "slow network"),
}
"""Faults that may lose a release: the worker then keeps the session until it needs its memory."""


@dataclass
class Outcome:
    failure: str = ""  # what did not hold; empty: everything held
    injected: Counter[str] = field(default_factory=Counter)  # number of faults by kind
    steps: int = 0
    simulated_s: float = 0.0
    digest: str = ""  # of all that the clients received, and when: the same for the same seed and faults


class Broken(AssertionError):
    """Something did not hold."""


def run_schedule(seed: int, real: RealRedis, faults: Sequence[Fault] | None = None) -> Outcome:
    """Run the schedule of a seed on a Redis, which is emptied; `faults` replace those drawn."""
    outcome = Outcome()
    with simulated(seed) as loop:
        start_s = loop.now
        drawn = draw_faults(random.Random(seed))
        run = Run(Cluster(loop, real), list(drawn if faults is None else faults), outcome)
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


class Run:
    """A schedule that runs: its streams and faults, and what did not hold."""

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
        # Redis lost the end of a turn, which another client then ended: the next one follows what was left.
        is_cut = stream.turn > 0 and self.has_lost_writes and stream.name in self.cancelled
        is_right = tuple(stream.received) == stream.expected[: len(stream.received)]
        if not (is_right or is_cut or self._may_resume_second(stream)):
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
        places = {name: stream.place for name, stream in self.streams.items()}
        self.streams["probe"] = draw_stream(self.rng, "s-probe", NUM_PROBED)
        self.start_client("probe")
        if await self._until(lambda: not self._running, self.loop.now + PROGRESS_S):
            return
        for name, stream in self.streams.items():
            if not stream.ended and stream.place == places.get(name, (0, 0)):
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
                is_whole = len(stream.received) == len(stream.expected)
                if not (is_whole or self._may_resume_second(stream)):
                    counts = f"{len(stream.received)} of {len(stream.expected)}"
                    self.fail(f"{stream.name}: ended with {counts} tokens")
            elif not self._is_excused(stream):
                self.fail(f"{stream.name}: ended with {stream.ended}: {stream.error}")

    def _may_resume_second(self, stream: Stream) -> bool:
        """Whether the stream may have resumed a session that began after its own was deleted."""
        return stream.name in self.deleted and not stream.is_second

    def _is_excused(self, stream: Stream) -> bool:
        """Whether a stream may end without all its tokens."""
        error, allowed = stream.error, set[type[GammarayError]]()
        if stream.name in self.deleted or self.has_lost_writes:
            allowed |= {FailedPreconditionError, NotFoundError, InternalError}
        if stream.name in self.contested:
            allowed |= {FailedPreconditionError}
        if self.was_full or self.cluster.max_requests == 1:
            allowed |= {ResourceExhaustedError}
        if "failed to connect" in str(error) and not stream.received:
            allowed |= {UnavailableError}  # a client that no server ever answered tries five times
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
        tasks = [task for process in self.loop.processes for task in process.tasks if not task.done()]
        if left := [name for task in tasks if (name := task.get_name()).startswith("cycles of")]:
            self.fail(f"tasks are left: {left}")
        failed = {stream.name for stream in self.streams.values() if stream.error is not None}
        running = self.cluster.running_sessions() - self.deleted - self.cancelled - failed
        if running and not self.has_lost_writes:
            self.fail(f"sessions count as running after their end: {sorted(running)}")
        for name, worker in self.cluster.workers.items():
            if not worker.process.is_alive:
                continue
            if worker.streams.num_ids or worker.engine.scheduler.queue.num_queued:
                self.fail(f"{name}: blocks are left")
            left = list(worker.engine.scheduler.queue.sessions)
            if left and not self.outcome.injected.keys() & BREAKING:
                self.fail(f"{name}: sessions are left: {left}")
