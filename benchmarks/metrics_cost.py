"""What counting costs: microseconds per cycle in the orchestrator, per step in a worker, and per scrape.

python -m benchmarks.metrics_cost
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from prometheus_client import generate_latest

from gammaray.bench.provenance import provenance
from gammaray.blocks import VerifyTiming
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
    timing=VerifyTiming(0.0001, 0.002, 1, 5),
    drafter=DrafterKind.MODEL,
)


def microseconds(call: Callable[[], object], calls: int = CALLS) -> float:
    """Return the time of one call: the least of several runs, since others use the machine too."""

    def run() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - began

    return round(min(run() for _ in range(REPEATS)) / calls * 1e6, 2)


def main() -> None:
    """Measure and print."""
    meter, worker = OrchestratorMeter(), WorkerMeter("target")
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

    result = {
        "orchestrator_us_per_cycle": microseconds(cycle),
        "worker_us_per_step_of_one_block": microseconds(step),
        "orchestrator_us_per_scrape": microseconds(lambda: generate_latest(exposed), 20),
    }
    print(json.dumps({"provenance": provenance(), **result}, indent=2))


if __name__ == "__main__":
    main()
