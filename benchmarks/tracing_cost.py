"""What tracing costs in tokens/s: paired runs of every session traced, one in a hundred, none, and off.

    python -m benchmarks.tracing_cost --rounds 200

Two clusters of the demo pair run at once. One exports spans to a sink in this process, which reads nothing of
them, as a collector on another machine would cost nothing here; whether a session is sampled is the caller's
choice, by `traceparent`. The other has no `OTEL_*` variable. In each round every mode generates the same
text once, in random order; ratios are those of one round. A mode's cost is 1 - median ratio to its baseline:
unsampled for *every* and *hundredth* (the same cluster), off for *unsampled* (the other one, so that the
luck of a cluster's placement is in it).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry import trace

from benchmarks.cluster import connected, run_or_exit
from benchmarks.provenance import write_result
from gammaray import AsyncClient
from gammaray.types import GammaPolicy

PROMPT = "def read_lines(path):\n"
BASELINES = {"every": "unsampled", "hundredth": "unsampled", "unsampled": "off"}
GOALS = {"every": 0.05, "hundredth": 0.01}
RESAMPLES = 2000
_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass
class Sink:
    """What came."""

    num_requests: int = 0
    num_bytes: int = 0

    def export(self, request: bytes, _: object) -> bytes:
        self.num_requests += 1
        self.num_bytes += len(request)
        return b""


@contextmanager
def sink() -> Iterator[tuple[str, Sink]]:
    """Run an OTLP endpoint that throws away what it gets."""
    taken = Sink()
    server = grpc.server(ThreadPoolExecutor(1))
    handlers = {"Export": grpc.unary_unary_rpc_method_handler(taken.export)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", taken
    finally:
        server.stop(0.5).wait(2.0)


def parent(is_sampled: bool) -> trace.Span:
    """Return a caller's span."""
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if is_sampled else trace.TraceFlags.DEFAULT)
    context = trace.SpanContext(
        random.getrandbits(128) or 1, random.getrandbits(64) or 1, is_remote=False, trace_flags=flags
    )
    return trace.NonRecordingSpan(context)


async def tokens_per_s(client: AsyncClient, num_tokens: int, gamma: GammaPolicy, seed: int) -> float:
    """Generate and return the speed from the first chunk to the last."""
    first = last = 0.0
    count = -1
    stream = client.generate(
        PROMPT, max_tokens=num_tokens, temperature=0.7, seed=seed, gamma=gamma, ignore_eos=True
    )
    async for chunk in stream:
        last = time.perf_counter()
        if count < 0:
            first, count = last, 0
        else:
            count += len(chunk.tokens)
    return count / (last - first)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds and return the result."""
    speeds: dict[str, list[float]] = defaultdict(list)
    gamma = GammaPolicy() if options.gamma is None else GammaPolicy(fixed=options.gamma)
    with sink() as (endpoint, taken):
        async with connected() as off:
            os.environ.update(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=endpoint)
            async with connected() as exporting:
                for round_number in range(-options.warm_ups, options.rounds):
                    modes = ["every", "hundredth", "unsampled", "off"]
                    random.shuffle(modes)
                    for mode in modes:
                        is_sampled = mode == "every" or (mode == "hundredth" and round_number % 100 == 0)
                        with trace.use_span(parent(is_sampled)):
                            client = off if mode == "off" else exporting
                            speed = await tokens_per_s(client, options.tokens, gamma, round_number + 1000)
                        if round_number >= 0:
                            speeds[mode].append(speed)
    return {
        "tokens": options.tokens,
        "rounds": options.rounds,
        "gamma": "adaptive" if options.gamma is None else options.gamma,
        "median_tokens_per_s": {mode: statistics.median(values) for mode, values in speeds.items()},
        "cost": {mode: cost(speeds[mode], speeds[base]) for mode, base in BASELINES.items()},
        "goals": GOALS,
        "exported_bytes": taken.num_bytes,
        "exports": taken.num_requests,
    }


def cost(speeds: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Return 1 - the median of paired ratios, with its 95 % bootstrap interval."""
    ratios = [own / other for own, other in zip(speeds, baseline, strict=True)]
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]
    return {"cost": 1 - statistics.median(ratios), "low": 1 - high, "high": 1 - low}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--warm-ups", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--gamma", type=int, help="Fixed gamma; adaptive without it.")
    result = run_or_exit(measure(parser.parse_args()))
    for mode, base in BASELINES.items():
        figures = result["cost"][mode]
        print(
            f"{mode:>10} against {base:<10} {figures['cost']:+.1%} of tokens/s "
            f"(95 %: {figures['low']:+.1%} to {figures['high']:+.1%})"
        )
    print(f"written to {write_result('tracing-cost', result)}")


if __name__ == "__main__":
    main()
