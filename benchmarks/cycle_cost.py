"""Where the time of a cycle goes: everything that is not a model forward, part by part.

    python -m benchmarks.cycle_cost

Starts a Redis, one target and one draft worker as processes of their own, and runs sessions in this process
with the orchestrator's own loop, drafter, verifier and store. Ray Serve, HTTP and the public gRPC API are
not on a cycle's path and not part of it; `benchmarks.run` has them. Each worker tells with every answer how
long its block was queued, how long the model's forwards took, and the rest; what a wait has beyond that is
gRPC and the event loops of both sides. CPU times per process are there because they, unlike waits, mean
something on a busy machine.
"""

from __future__ import annotations

# First of all: the package sets what gRPC reads when it is imported.
from orchestrator.costs import CostModel

# isort: split
import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cluster import run_or_exit
from benchmarks.provenance import write_result
from gammaray import GenerationRequest, SamplingParams
from gammaray.bench.workloads import prompts
from gammaray.types import Proposal
from orchestrator.cycle import Shape
from orchestrator.fleet import Fleet
from orchestrator.gamma import FixedGamma
from orchestrator.pipeline import run_cycles
from orchestrator.redis_calls import answer, connect
from orchestrator.redis_server import RedisServer
from orchestrator.registry import RedisRegistry
from orchestrator.remote import session_spec
from orchestrator.remote_draft import RemoteDrafter
from orchestrator.remote_target import RemoteVerifier
from orchestrator.requests import open_session
from orchestrator.session import Session
from orchestrator.store import RedisStore
from orchestrator.tokenizer import Tokenizer, resolve_model

__all__ = ["main"]

_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 20.0
_SKIPPED_CYCLES = 4
"""First cycles of a session that are not counted: prefill, first touches of buffers."""


@dataclass
class _Asked:
    """One call to a worker: microseconds of the wait, and of the worker's own accounts within it."""

    wait_us: float
    queue_us: int
    compute_us: int
    forward_us: int


@dataclass
class _Cycle:
    """One cycle: its period, from the emission before to its own, and the calls it made."""

    period_us: float
    draft: _Asked | None
    verify: _Asked


@dataclass
class _Calls:
    """The calls of the running cycle."""

    draft: list[_Asked] = field(default_factory=list)
    verify: list[_Asked] = field(default_factory=list)


class _TimedDrafter(RemoteDrafter):
    calls: _Calls

    async def _ask(self, session: Session, link: Any, timeout_s: float) -> Any:
        return await _timed(super()._ask(session, link, timeout_s), self.calls.draft)

    def _take_prepared(self, session: Session, link: Any, shape: Shape) -> Proposal | None:
        proposal = super()._take_prepared(session, link, shape)
        if proposal is not None:
            self.calls.draft.append(_Asked(0.0, 0, 0, 0))
        return proposal


class _TimedVerifier(RemoteVerifier):
    calls: _Calls

    async def _ask(self, session: Session, link: Any, timeout_s: float) -> Any:
        return await _timed(super()._ask(session, link, timeout_s), self.calls.verify)


class _TimedStore(RedisStore):
    """Notes how long each write took, in microseconds."""

    waits: list[float]

    async def append(self, *args: Any) -> None:
        start = time.perf_counter()
        await super().append(*args)
        self.waits.append((time.perf_counter() - start) * 1e6)


async def _timed(call: Any, calls: list[_Asked]) -> Any:
    start = time.perf_counter()
    result = await call
    wait_us = (time.perf_counter() - start) * 1e6
    timing = result.timing
    calls.append(_Asked(wait_us, timing.queue_us, timing.compute_us, timing.forward_us))
    return result


@dataclass(frozen=True)
class _Stack:
    """What a session runs on."""

    fleet: Fleet
    store: _TimedStore
    tokenizer: Tokenizer
    pids: dict[str, int]

    async def run(self, request: GenerationRequest, gamma: int) -> list[_Cycle]:
        """Return the cycles of one completion but the first ones."""
        session = await open_session(request, self.tokenizer, self.tokenizer.max_context)
        await self.store.create(session, b"")
        spec = session_spec(session, self.tokenizer.eos_token_ids, shares_caches=False)
        drafter = _TimedDrafter(
            self.fleet.drafts,
            spec,
            timeout_s=10.0,
            prefill_timeout_s=60.0,
            vocab_size=self.tokenizer.vocab_size,
        )
        verifier = _TimedVerifier(self.fleet.targets, spec, timeout_s=60.0, wait_s=10.0)
        calls = drafter.calls = verifier.calls = _Calls()
        controller = FixedGamma(gamma, CostModel())
        found: list[_Cycle] = []
        emitted = time.perf_counter()
        async with aclosing(run_cycles(session, drafter, verifier, self.store, controller)) as cycles:
            async for cycle in cycles:
                now = time.perf_counter()
                # The next cycle is under way already; this one's calls are the oldest.
                draft = calls.draft.pop(0) if cycle.num_drafted else None
                found.append(_Cycle((now - emitted) * 1e6, draft, calls.verify.pop(0)))
                emitted = now
        drafter.release(session)
        verifier.release(session)
        return found[_SKIPPED_CYCLES:]


@contextmanager
def _worker(role: str, redis_url: str, cores: str) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", f"services.{role}", "--redis-url", redis_url, "--cpu-affinity", cores]
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
async def _stack(pinned: bool) -> AsyncIterator[_Stack]:
    cores = sorted(map(str, os.sched_getaffinity(0)))
    target_cores, draft_cores = (cores[0], cores[1]) if pinned and len(cores) > 1 else ("", "")
    with (
        tempfile.TemporaryDirectory() as directory,
        RedisServer.start(Path(directory)) as server,
        _worker("target", server.url, target_cores) as (target_address, target_pid),
        _worker("draft", server.url, draft_cores) as (draft_address, draft_pid),
    ):
        redis = connect(server.url)
        await answer(redis.ping())
        tokenizer = Tokenizer(resolve_model("demo"))
        fleet = Fleet(
            RedisRegistry(redis),
            tokenizer.vocab_size,
            target_addresses=target_address,
            draft_addresses=draft_address,
        )
        await fleet.start(_START_TIMEOUT_S)
        store = _TimedStore(redis, 600)
        store.waits = []
        pids = {"orchestrator": os.getpid(), "target": target_pid, "draft": draft_pid, "redis": server.pid}
        try:
            yield _Stack(fleet, store, tokenizer, pids)
        finally:
            await fleet.close()
            await redis.aclose()


def _cpu_us(pid: int) -> float:
    """CPU time of all threads of a process so far; Linux tells it in nanoseconds per thread."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        total += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
    return total / 1e3


def _row(
    gamma: int, cycles: Sequence[_Cycle], cpu_us: dict[str, float], writes: Sequence[float]
) -> dict[str, Any]:
    """Return medians in milliseconds; `beside` is the median of what each cycle had beyond its forwards."""

    def median(values: Iterator[float] | Sequence[float]) -> float:
        return round(statistics.median(values) / 1e3, 3)

    asked = [[one for one in (cycle.draft, cycle.verify) if one is not None] for cycle in cycles]
    forwards = [sum(one.forward_us for one in calls) for calls in asked]
    return {
        "gamma": gamma,
        "num_cycles": len(cycles),
        "prepared": sum(c.draft is not None and c.draft.wait_us == 0 for c in cycles) / len(cycles),
        "cycle_ms": median([c.period_us for c in cycles]),
        "draft_forwards_ms": median([c.draft.forward_us if c.draft else 0.0 for c in cycles]),
        "verify_forward_ms": median([float(c.verify.forward_us) for c in cycles]),
        "beside_ms": median([c.period_us - f for c, f in zip(cycles, forwards, strict=True)]),
        "queue_ms": median([float(sum(one.queue_us for one in calls)) for calls in asked]),
        "worker_ms": median(
            [float(sum(one.compute_us - one.forward_us for one in calls)) for calls in asked]
        ),
        "wire_ms": median(
            [sum(one.wait_us - one.queue_us - one.compute_us for one in calls) for calls in asked]
        ),
        "orchestrator_ms": median(
            [c.period_us - sum(one.wait_us for one in calls) for c, calls in zip(cycles, asked, strict=True)]
        ),
        "redis_write_ms": median(writes),
        "cpu_ms_per_cycle": cpu_us,
    }


@dataclass
class _Sum:
    """What was measured at one gamma; microseconds."""

    cycles: list[_Cycle] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)
    wall: float = 0.0

    async def add(self, stack: _Stack, requests: Sequence[GenerationRequest], gamma: int) -> None:
        """Run `requests` at once."""
        before = {name: _cpu_us(pid) for name, pid in stack.pids.items()}
        stack.store.waits.clear()
        start = time.perf_counter()
        for found in await asyncio.gather(*(stack.run(request, gamma) for request in requests)):
            self.cycles += found
        self.wall += (time.perf_counter() - start) * 1e6
        self.writes += stack.store.waits
        for name, pid in stack.pids.items():
            self.cpu[name] = self.cpu.get(name, 0.0) + _cpu_us(pid) - before[name]


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    texts = prompts("code", max(args.rounds, args.sessions))
    sums = {gamma: _Sum() for gamma in args.gammas}
    async with _stack(args.pin) as stack:
        for index in range(args.rounds + 1):
            requests = [
                GenerationRequest(
                    prompt=texts[(index + number) % len(texts)],
                    max_tokens=args.max_tokens,
                    sampling=SamplingParams(temperature=args.temperature, seed=number),
                    ignore_eos=True,
                )
                for number in range(args.sessions)
            ]
            for gamma, done in sums.items():
                await (done if index else _Sum()).add(stack, requests, gamma)  # the first is a warm-up
    rows = []
    for gamma, done in sums.items():
        num_sessions = args.rounds * args.sessions
        num_cycles = len(done.cycles) + _SKIPPED_CYCLES * num_sessions
        cpu_ms = {name: round(spent / num_cycles / 1e3, 3) for name, spent in done.cpu.items()}
        row = _row(gamma, done.cycles, cpu_ms, done.writes)
        rows.append(row | {"tokens_per_s": round(num_sessions * args.max_tokens / done.wall * 1e6, 1)})
    return {"settings": vars(args) | {"out": None}, "rows": rows}


def _print(rows: Sequence[dict[str, Any]]) -> None:
    names = [name for name in rows[0] if name.endswith("_ms")]
    print(f"{'ms, medians':24s}" + "".join(f"{'gamma ' + str(row['gamma']):>18s}" for row in rows))
    for name in names:
        cells = [f"{row[name]:8.3f} {100 * row[name] / row['cycle_ms']:6.1f} %" for row in rows]
        print(f"{name.removesuffix('_ms'):24s}" + "".join(f"{cell:>18s}" for cell in cells))
    print(f"{'prepared':24s}" + "".join(f"{row['prepared']:>18.2f}" for row in rows))
    for name in rows[0]["cpu_ms_per_cycle"]:
        cells = [f"{row['cpu_ms_per_cycle'][name]:8.3f}         " for row in rows]
        print(f"{'cpu ' + name:24s}" + "".join(f"{cell:>18s}" for cell in cells))
    print(f"{'tokens/s':24s}" + "".join(f"{row['tokens_per_s']:>18.1f}" for row in rows))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gammas", type=int, nargs="+", default=[0, 4], help="fixed gammas")
    parser.add_argument("--rounds", type=int, default=5, help="how often each gamma has its turn")
    parser.add_argument("--sessions", type=int, default=1, help="sessions at once")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--pin", action="store_true", help="a core each for target and draft worker")
    parser.add_argument("--out", type=Path, help="result file; default: results/cycle-cost-<date>.json")
    args = parser.parse_args(argv)
    result = run_or_exit(_measure(args))
    _print(result["rows"])
    print(write_result("cycle-cost", result, args.out))


if __name__ == "__main__":
    import uvloop

    uvloop.install()
    main()
