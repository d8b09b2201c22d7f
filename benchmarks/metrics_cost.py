"""What counting costs: microseconds per cycle in the orchestrator, per step in a worker, and per scrape.

    python -m benchmarks.metrics_cost

The same updates are made with counters and histograms of prometheus_client, in turn. Times are CPU times of
the thread; the least of several runs counts. The shares are of a cycle (`--cycle-ms`): updates of the
orchestrator and of one step in each of two workers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from rich.console import Console

from benchmarks.provenance import write_result
from gammaray.bench.tables import plain_table
from gammaray.blocks import VerifyTiming
from gammaray.telemetry.catalog import by_name
from gammaray.telemetry.prometheus import registry
from gammaray.types import Chunk, DrafterKind, GenerationRequest, TokenOrigin
from orchestrator.cycle.types import Cycle
from orchestrator.telemetry.metrics import OrchestratorMeter
from services.scheduling.metrics import WorkerMeter

REPEATS, CALLS = 7, 20_000

_ORIGINS = (TokenOrigin.ACCEPTED, TokenOrigin.ACCEPTED, TokenOrigin.CORRECTION)
_CYCLE = Cycle(
    gamma=4,
    num_drafted=4,
    num_tested=3,
    num_accepted=2,
    token_ids=(1, 2, 3),
    origins=_ORIGINS,
    logprobs=(),
    text="",
    finish_reason=None,
    draft_s=0.001,
    verify_s=0.003,
    total_s=0.0045,
    is_first=False,
    draft_failed=False,
    timing=VerifyTiming(0.0001, 0.002, 1, 5, 5),
    drafter=DrafterKind.MODEL,
)


class PrometheusMeter:
    """The updates of a cycle and of a step with prometheus_client's own counters and histograms."""

    def __init__(self) -> None:
        registry = CollectorRegistry()

        def counter(name: str, **labels: str) -> Any:
            family = Counter(by_name(name).family, name, labels.keys(), registry=registry)
            return family.labels(**labels) if labels else family

        def histogram(name: str, **labels: str) -> Any:
            metric = by_name(name)
            family = Histogram(metric.family, name, labels.keys(), buckets=metric.buckets, registry=registry)
            return family.labels(**labels) if labels else family

        prefix = "gammaray.spec_decode.num_"
        names = ("drafts", "draft_tokens", "tested_tokens", "accepted_tokens")
        self._drafts = [counter(prefix + name) for name in names]
        position = Counter("position", "by position", ["position"], registry=registry)
        self._positions = [position.labels(str(number)) for number in range(16)]
        tokens = Counter("tokens", "by origin", ["origin"], registry=registry)
        self._tokens = {origin: tokens.labels(origin.value) for origin in TokenOrigin}
        cycles = Counter("cycles", "by drafter", ["rung"], registry=registry)
        self._cycles = {kind: cycles.labels(kind.value) for kind in DrafterKind}
        self._fallbacks = counter("gammaray.cycle.fallbacks")
        self._gamma = histogram("gammaray.cycle.gamma")
        self._duration = histogram("gammaray.cycle.duration")
        parts = Counter("parts", "by part", ["part"], registry=registry)
        self._parts = [parts.labels(str(number)) for number in range(5)]
        self._decode_s = counter("gammaray.decode.time")
        self._plain_s = counter("gammaray.decode.plain_time")
        self._between_s = histogram("gammaray.inter_token_latency")
        self._wait_s = histogram("gammaray.worker.queue.time", role="target")
        self._step_s = histogram("gammaray.worker.step.duration", role="target")
        self._blocks = histogram("gammaray.worker.step.blocks", role="target")
        self._step_tokens = counter("gammaray.worker.step.tokens", role="target")
        self._outcome = counter("gammaray.worker.blocks", role="target", outcome="done")

    def cycle(self, cycle: Cycle, plain_cycle_s: float) -> None:
        """Make the updates of `OrchestratorMeter.cycle` and `RequestMeter.deliver`."""
        emitted, timing = len(cycle.token_ids), cycle.timing
        assert timing is not None
        accepted = cycle.origins.count(TokenOrigin.ACCEPTED)
        self._cycles[cycle.drafter].inc()
        self._fallbacks.inc(cycle.is_fallback)
        for counter, value in zip(
            self._drafts, (1, cycle.num_drafted, min(cycle.num_tested, emitted), accepted), strict=True
        ):
            counter.inc(value)
        for number in range(accepted):
            self._positions[number].inc()
        self._tokens[TokenOrigin.ACCEPTED].inc(accepted)
        self._tokens[cycle.origins[-1]].inc(emitted - accepted)
        self._gamma.observe(cycle.gamma)
        self._duration.observe(cycle.total_s)
        wire_s = cycle.verify_s - timing.queue_s - timing.compute_s
        other_s = cycle.total_s - cycle.draft_s - cycle.verify_s
        for part, seconds in zip(
            self._parts, (cycle.draft_s, timing.queue_s, timing.compute_s, wire_s, other_s), strict=True
        ):
            part.inc(seconds)
        self._decode_s.inc(cycle.total_s)
        self._plain_s.inc(emitted * plain_cycle_s)
        self._between_s.observe(0.004)

    def step(self) -> None:
        """Make the updates of a worker's step with one block."""
        self._wait_s.observe(0.001)
        self._step_s.observe(0.002)
        self._blocks.observe(4)
        self._step_tokens.inc(20)
        self._outcome.inc()


def microseconds(calls: dict[str, Callable[[], object]], count: int = CALLS) -> dict[str, float]:
    """Return the CPU time of one call of each, the least of several runs."""

    def run(call: Callable[[], object]) -> float:
        began = time.thread_time()
        for _ in range(count):
            call()
        return time.thread_time() - began

    runs = [{name: run(call) for name, call in calls.items()} for _ in range(REPEATS)]
    return {name: round(min(run[name] for run in runs) / count * 1e6, 2) for name in calls}


def measure(cycle_ms: float) -> dict[str, Any]:
    """Return the microseconds of both kinds of metrics, and their share of a cycle."""
    meter, worker, theirs = OrchestratorMeter(), WorkerMeter("target"), PrometheusMeter()
    request = meter.request(GenerationRequest("Hi"))
    chunk = Chunk("s", "", ())
    exposed = registry(meter.meter)

    def cycle() -> None:
        meter.cycle(_CYCLE, 0.002)
        request.deliver(chunk)

    def step() -> None:
        worker.waited(0.001)
        worker.step(0.002, 4, 20)
        worker.answered(None)

    cycles = microseconds({"gammaray": cycle, "prometheus_client": lambda: theirs.cycle(_CYCLE, 0.002)})
    steps = microseconds({"gammaray": step, "prometheus_client": theirs.step})
    scrape = microseconds({"scrape": lambda: generate_latest(exposed)}, 20)["scrape"]
    return {
        "cycle_ms": cycle_ms,
        "orchestrator_us_per_cycle": cycles,
        "worker_us_per_step_of_one_block": steps,
        "share_of_cycle": {name: (cycles[name] + 2 * steps[name]) / cycle_ms / 1e3 for name in cycles},
        "orchestrator_us_per_scrape": scrape,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cycle-ms", type=float, default=2.09, help="cycle that the shares are of (gamma 0)")
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args(argv)
    result = measure(options.cycle_ms)
    table = plain_table(
        "Metrics, microseconds", ("by", "cycle", "step", f"cycle and two steps of {options.cycle_ms:g} ms")
    )
    for name, share in result["share_of_cycle"].items():
        cycle, step = (
            result[key][name] for key in ("orchestrator_us_per_cycle", "worker_us_per_step_of_one_block")
        )
        table.add_row(name, f"{cycle:.1f}", f"{step:.1f}", f"{share:.2%}")
    Console().print(table)
    print(f"a scrape of the orchestrator: {result['orchestrator_us_per_scrape']:.0f} us")
    print(f"written to {write_result('metrics-cost', result, options.out)}")


if __name__ == "__main__":
    main()
