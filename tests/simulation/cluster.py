"""The simulated cluster: orchestrators, workers and clients of the product, each a process of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

from gammaray.config import OrchestratorSettings
from gammaray.demo_pair import resolve_model
from gammaray.errors import GammarayError
from gammaray.v1 import generation_service_pb2_grpc as generation
from gammaray.v1.draft_service_pb2_grpc import add_DraftServiceServicer_to_server
from gammaray.v1.target_service_pb2_grpc import add_TargetServiceServicer_to_server
from orchestrator import service
from orchestrator.api.grpc_servicer import GenerationServicer
from orchestrator.service import Orchestrator
from orchestrator.text.tokenizer import Tokenizer
from orchestrator.workers import verifier
from services.draft_worker.worker import DraftServicer
from services.process.registry import Announcer
from services.streaming.messages import Model
from services.streaming.streams import BlockStream, Streams
from services.target_worker.worker import TargetServicer
from tests.simulation import redis_link
from tests.simulation.loop import Process, SimulatedLoop
from tests.simulation.network import Network, Server
from tests.simulation.redis_link import RealRedis, RedisServer
from tests.simulation.tiny_model import (
    MAX_CONTEXT,
    VOCAB_SIZE,
    SteppedEngine,
    draft_scheduler,
    target_scheduler,
)

SERVE = "unix:serve"
WORKERS = ("draft-0", "draft-1", "target-0", "target-1")
ORCHESTRATORS = ("orchestrator-0", "orchestrator-1")
START_S = 0.5
"""Most seconds until a process that ended runs again."""

PREFIX = "simulated"
SESSION = f"{PREFIX}:session:{{"
"""Beginning of the keys of sessions."""

STEP_S = ((5e-4, 4e-3), (5e-4, 4e-3), (5e-3, 3e-2), (5e-3, 3e-2), (0.05, 0.2))
"""Least and most seconds of an engine's step: one of these, the same for all workers. With the last one a
stream takes about as long as a lease."""

CACHE_BYTES = (1 << 20, 1 << 20, 512)
"""The last one has room for two sessions."""

MAX_REQUESTS = (8, 8, 1)


@cache
def tokenizer() -> Tokenizer:
    """Return the demo pair's tokenizer, cut to the tiny model's tokens."""
    found = Tokenizer(resolve_model("demo"))
    found.vocab_size, found.max_context = VOCAB_SIZE, MAX_CONTEXT
    found.eos_token_ids, found.vocab_sha256 = frozenset(), ""
    return found


@cache
def settings(max_requests: int) -> OrchestratorSettings:
    """Return the orchestrators' settings; reading them takes longer than all else of their start."""
    return OrchestratorSettings(
        redis_url=redis_link.URL,
        redis_prefix=PREFIX,
        model="demo",
        max_concurrent_requests=max_requests,
        metrics_listen="",  # a server in a thread, whose end takes real time
    )


class Worker:
    """A draft or target worker, with its engine and its open streams."""

    def __init__(self, cluster: Cluster, name: str, address: str) -> None:
        self.process = cluster.loop.process(name)
        self.role, self.address = name.partition("-")[0], address
        self._cluster = cluster
        self.server = Server(self.process)
        size = cluster.cache_bytes
        if self.role == "draft":
            scheduler: Any = draft_scheduler(size, ahead=cluster.drafts_ahead)
        else:
            scheduler = target_scheduler(size)
        self.engine: Any = SteppedEngine(cluster.loop, scheduler, cluster.step_s)
        self.streams = Streams(self.engine)
        self.announcer: Announcer | None = None

    async def run(self) -> None:
        model = Model(self.role, VOCAB_SIZE, MAX_CONTEXT, "", identity="tiny")
        if self.role == "draft":
            add_DraftServiceServicer_to_server(DraftServicer(self.streams, model), self.server)
        else:
            add_TargetServiceServicer_to_server(TargetServicer(self.streams, model), self.server)
        self._cluster.network.servers[self.address] = self.server
        self.announcer = Announcer(redis_link.URL, self.role, self.address, PREFIX)
        await self.announcer.start()

    @property
    def is_leaving(self) -> bool:
        """Whether it takes no new blocks."""
        return self.streams.is_leaving

    async def stop(self) -> None:
        """End as on SIGTERM."""
        if self.announcer is not None:
            await self.announcer.withdraw()
        await self.streams.drain(10.0)


class Api(generation.GenerationServiceServicer):
    """What `orchestrator.app` passes on from Serve."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        servicer = GenerationServicer(orchestrator)
        self.Generate = servicer.generate
        self.Cancel, self.DeleteSession = servicer.cancel, servicer.delete_session


class Replica:
    """An orchestrator's replica; Serve starts it again when its start fails."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.process = cluster.loop.process(name)
        self._cluster = cluster
        self.server = Server(self.process)
        self.orchestrator: Orchestrator | None = None

    async def run(self) -> None:
        while self.orchestrator is None:
            try:
                self.orchestrator = await Orchestrator.start(settings(self._cluster.max_requests))
            except GammarayError:
                await asyncio.sleep(START_S)
        generation.add_GenerationServiceServicer_to_server(Api(self.orchestrator), self.server)
        self._cluster.network.balance(SERVE, self.server)

    @property
    def is_leaving(self) -> bool:
        """Whether it takes no new requests."""
        return self.orchestrator is None or not self.server.is_serving

    async def stop(self) -> None:
        """End as Serve ends a replica: streams have five seconds to end."""
        assert self.orchestrator is not None
        self.server.is_serving = False
        deadline = self._cluster.loop.now + 5.0
        while any(one.server_calls for one in self.server.connections):
            if self._cluster.loop.now > deadline:
                break
            await asyncio.sleep(0.1)
        await self.orchestrator.close()


class Cluster:
    """All processes but the clients.

    Attributes:
        loop: The simulated loop.
        network: The network between the processes.
        redis: The simulated Redis.
        workers: By name.
        replicas: The orchestrators, by name.
        step_s: Least and most seconds of an engine's step.
        drafts_ahead: Whether draft workers draft ahead.
        cache_bytes: Size of a worker's cache.
        max_requests: Requests that an orchestrator runs at once.
    """

    def __init__(self, loop: SimulatedLoop, real: RealRedis) -> None:
        self.loop, self.rng = loop, loop.rng
        self.network = Network(loop)
        self.redis = RedisServer(loop, real, SESSION.encode(), self.network)
        loop.dial = self.redis.connect
        self.step_s = self.rng.choice(STEP_S)
        self.drafts_ahead = self.rng.random() < 0.5
        self.cache_bytes = self.rng.choice(CACHE_BYTES)
        is_slow = self.step_s == STEP_S[-1]  # then one waits too long for another
        self.max_requests = MAX_REQUESTS[0] if is_slow else self.rng.choice(MAX_REQUESTS)
        self.workers: dict[str, Worker] = {}
        self.replicas: dict[str, Replica] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._num_started = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Patch what the product takes from outside: gRPC's channels, and the tokenizer's files."""
        numbers = itertools.count()

        def number(stream: BlockStream) -> int:  # not its address, which would order sets of streams
            return int(vars(stream).setdefault("number", next(numbers)))

        with (
            self.network.installed(),
            patch.object(service, "Tokenizer", lambda _: tokenizer()),
            patch.object(verifier, "CROWD", 1),
            patch.object(BlockStream, "__hash__", number),
        ):
            yield

    def start(self, name: str, address: str = "") -> None:
        """Start a process; a worker without an address gets a new one."""
        self._num_started += 1
        if name in ORCHESTRATORS:
            replica = self.replicas[name] = Replica(self, name)
            self._spawn(replica.process, replica.run())
        else:
            worker = self.workers[name] = Worker(self, name, address or f"{name}:{self._num_started}")
            self._spawn(worker.process, worker.run())

    def _spawn(self, process: Process, work: Any) -> None:
        self._tasks.append(self.loop.create_task(work, context=process.context))

    def running(self, name: str) -> Worker | Replica | None:
        """Return a process that is not killed; None while there is none."""
        found = self.workers.get(name) or self.replicas.get(name)
        return found if found is not None and found.process.is_alive else None

    def kill(self, name: str) -> None:
        """End a process without notice, and start it again after a while."""
        one = self.running(name)
        if one is None:
            return
        self.loop.kill(one.process)
        self.network.end(one.process)
        keeps_address = isinstance(one, Worker) and self.rng.random() < 0.5
        address = one.address if keeps_address and isinstance(one, Worker) else ""
        self.loop.call_later(
            self.rng.uniform(0.05, START_S), self.start, name, address, context=self.loop.harness.context
        )

    def drain(self, name: str) -> None:
        """End a process as SIGTERM does, and start another one."""
        one = self.running(name)
        if one is None or one.is_leaving:
            return

        async def stop() -> None:
            await one.stop()
            one.server.is_serving = False
            for connection in self.network.connections:
                if one.process in (connection.client, connection.server.process):
                    connection.reset("the process has ended")
            self.loop.kill(one.process)
            self.loop.call_soon(self.start, name, context=self.loop.harness.context)

        self._spawn(one.process, stop())

    async def until_ready(self) -> None:
        """Wait until all processes serve and know each other."""

        def is_ready(name: str) -> bool:
            replica = self.replicas.get(name)
            if replica is None or replica.orchestrator is None:
                return False
            fleet = replica.orchestrator.fleet
            return fleet.targets.num_up() + fleet.drafts.num_up() >= len(WORKERS)

        while not all(map(is_ready, ORCHESTRATORS)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def running_sessions(self) -> set[str]:
        """Return the sessions that have an owner according to Redis."""
        return {name.decode() for name in self.redis.real.admin.smembers(f"{PREFIX}:running")}

    def stored_tokens(self, session_id: str) -> tuple[int, int]:
        """Return a session's turn, and how many tokens of it Redis holds now."""
        turn, size = self.redis.stored.get(f"{SESSION}{session_id}}}".encode(), (0, 0))
        return turn, size // RECORD_BYTES


RECORD_BYTES = 5
"""Bytes of a stored token without log-probabilities."""
