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

# First of all: the orchestrator's package sets what gRPC reads when it is imported.
from benchmarks.timed_stack import SKIPPED_CYCLES, Cycle, Stack, running_stack

# isort: split
import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cluster import run_or_exit
from benchmarks.provenance import write_result
from gammaray import GenerationRequest, SamplingParams
from gammaray.bench.workloads import prompts

__all__ = ["main"]


def _cpu_us(pid: int) -> float:
    """CPU time of all threads of a process so far; Linux tells it in nanoseconds per thread."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        total += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
    return total / 1e3


def _row(
    gamma: int, cycles: Sequence[Cycle], cpu_us: dict[str, float], writes: Sequence[float]
) -> dict[str, Any]:
    """Return medians in milliseconds; `overhead_ms` is the median time of a cycle without its forwards."""

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
        "overhead_ms": median([c.period_us - f for c, f in zip(cycles, forwards, strict=True)]),
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

    cycles: list[Cycle] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)
    wall: float = 0.0

    async def add(self, stack: Stack, requests: Sequence[GenerationRequest], gamma: int) -> None:
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
    async with running_stack(args.pin) as stack:
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
        num_cycles = len(done.cycles) + SKIPPED_CYCLES * num_sessions
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
