"""The stack without Ray Serve and the public API, whose every call and write is timed.

A Redis, one target and one draft worker run as processes of their own; sessions run in this process with the
orchestrator's own loop, drafter, verifier and store.
"""

from __future__ import annotations

# First of all: the package sets what gRPC reads when it is imported.
from orchestrator.gamma.cost_model import CostModel

# isort: split
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gammaray import GenerationRequest
from gammaray.blocks import Shape
from gammaray.demo_pair import resolve_model
from gammaray.types import Proposal
from orchestrator.cycle.pipeline import run_cycles
from orchestrator.cycle.session import Session
from orchestrator.gamma.fixed import FixedGamma
from orchestrator.launcher.redis_server import RedisServer
from orchestrator.sessions.lifecycle import open_session
from orchestrator.storage.client import answer, connect
from orchestrator.storage.registry import RedisRegistry
from orchestrator.storage.session_store import RedisStore
from orchestrator.text.tokenizer import Tokenizer
from orchestrator.workers.drafter import RemoteDrafter
from orchestrator.workers.fleet import Fleet
from orchestrator.workers.session_client import session_spec
from orchestrator.workers.verifier import RemoteVerifier

__all__ = [
    "SKIPPED_CYCLES",
    "Asked",
    "Cycle",
    "Stack",
    "connected_stack",
    "running_stack",
    "worker_process",
]

_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 20.0
SKIPPED_CYCLES = 4
"""First cycles of a session that are not counted: prefill, first touches of buffers."""


@dataclass
class Asked:
    """One call to a worker: microseconds of the wait, and of the worker's own accounts within it."""

    wait_us: float
    queue_us: int
    compute_us: int
    forward_us: int


@dataclass
class Cycle:
    """One cycle: its period, from the emission before to its own, and the calls it made."""

    period_us: float
    draft: Asked | None
    verify: Asked


@dataclass
class Calls:
    """The calls of the running cycle."""

    draft: list[Asked] = field(default_factory=list)
    verify: list[Asked] = field(default_factory=list)


class TimedDrafter(RemoteDrafter):
    calls: Calls

    async def _ask(self, session: Session, link: Any, timeout_s: float) -> Any:
        return await _timed(super()._ask(session, link, timeout_s), self.calls.draft)

    def _take_prepared(self, session: Session, link: Any, shape: Shape) -> Proposal | None:
        proposal = super()._take_prepared(session, link, shape)
        if proposal is not None:
            self.calls.draft.append(Asked(0.0, 0, 0, 0))
        return proposal


class TimedVerifier(RemoteVerifier):
    calls: Calls

    async def _ask(self, session: Session, link: Any, timeout_s: float) -> Any:
        return await _timed(super()._ask(session, link, timeout_s), self.calls.verify)


class TimedStore(RedisStore):
    """Notes how long each write took, in microseconds."""

    waits: list[float]

    async def append(self, *args: Any) -> None:
        start = time.perf_counter()
        await super().append(*args)
        self.waits.append((time.perf_counter() - start) * 1e6)


async def _timed(call: Any, calls: list[Asked]) -> Any:
    start = time.perf_counter()
    result = await call
    wait_us = (time.perf_counter() - start) * 1e6
    timing = result.timing
    calls.append(Asked(wait_us, timing.queue_us, timing.compute_us, timing.forward_us))
    return result


@dataclass(frozen=True)
class Stack:
    """What a session runs on."""

    fleet: Fleet
    store: TimedStore
    tokenizer: Tokenizer
    pids: dict[str, int]

    async def run(self, request: GenerationRequest, gamma: int) -> list[Cycle]:
        """Return the cycles of one completion but the first ones."""
        session = await open_session(request, self.tokenizer, self.tokenizer.max_context)
        await self.store.create(session, b"")
        spec = session_spec(session, self.tokenizer.eos_token_ids, shares_caches=False)
        drafter = TimedDrafter(
            self.fleet.drafts,
            spec,
            timeout_s=10.0,
            prefill_timeout_s=60.0,
            vocab_size=self.tokenizer.vocab_size,
        )
        verifier = TimedVerifier(self.fleet.targets, spec, timeout_s=60.0, wait_s=10.0)
        calls = drafter.calls = verifier.calls = Calls()
        controller = FixedGamma(gamma, CostModel())
        found: list[Cycle] = []
        emitted = time.perf_counter()
        async with aclosing(run_cycles(session, drafter, verifier, self.store, controller)) as cycles:
            async for cycle in cycles:
                now = time.perf_counter()
                # The next cycle is under way already; this one's calls are the oldest.
                draft = calls.draft.pop(0) if cycle.num_drafted else None
                found.append(Cycle((now - emitted) * 1e6, draft, calls.verify.pop(0)))
                emitted = now
        drafter.release(session)
        verifier.release(session)
        return found[SKIPPED_CYCLES:]


@contextmanager
def worker_process(role: str, *options: str, module: str = "", cores: str = "") -> Iterator[tuple[str, int]]:
    """Run a draft or target worker of the demo pair; yields its address and pid.

    Args:
        role: draft or target.
        options: Its options.
        module: Module that is run; empty: `services.<role>`.
        cores: Comma-separated CPU cores that it is pinned to; empty: it may use all.
    """
    pinned = ["taskset", "--cpu-list", cores] if cores else []
    command = [*pinned, sys.executable, "-m", module or f"services.{role}", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("listening "):
                raise SystemExit(f"failed: the {role} worker did not start")
            yield line.split()[1], process.pid
        finally:
            process.terminate()
            process.wait(_STOP_TIMEOUT_S)


@asynccontextmanager
async def running_stack(pinned: bool) -> AsyncIterator[Stack]:
    cores = sorted(map(str, os.sched_getaffinity(0)))
    target_cores, draft_cores = (cores[0], cores[1]) if pinned and len(cores) > 1 else ("", "")
    with (
        tempfile.TemporaryDirectory() as directory,
        RedisServer.start(Path(directory)) as server,
        worker_process("target", "--redis-url", server.url, cores=target_cores) as (
            target_address,
            target_pid,
        ),
        worker_process("draft", "--redis-url", server.url, cores=draft_cores) as (
            draft_address,
            draft_pid,
        ),
    ):
        pids = {"orchestrator": os.getpid(), "target": target_pid, "draft": draft_pid, "redis": server.pid}
        async with connected_stack(server.url, target_address, draft_address, pids) as stack:
            yield stack


@asynccontextmanager
async def connected_stack(
    redis_url: str, target_address: str, draft_address: str, pids: dict[str, int]
) -> AsyncIterator[Stack]:
    """Connect to a Redis and to two workers."""
    redis = connect(redis_url)
    await answer(redis.ping())
    tokenizer = Tokenizer(resolve_model("demo"))
    fleet = Fleet(
        RedisRegistry(redis),
        tokenizer.vocab_size,
        target_addresses=target_address,
        draft_addresses=draft_address,
    )
    await fleet.start(_START_TIMEOUT_S)
    store = TimedStore(redis, 600)
    store.waits = []
    try:
        yield Stack(fleet, store, tokenizer, pids)
    finally:
        await fleet.close()
        await redis.aclose()
