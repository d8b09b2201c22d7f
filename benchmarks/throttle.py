"""What the throttle of draft-ahead is worth where the two workers share a core, and where they do not.

    python -m benchmarks.throttle

Draft-ahead prepares proposals while the target verifies. On a core of its own that is free; on a shared core
it delays the verification, unless it runs at idle priority, which needs CAP_SYS_NICE. One target worker and
four draft workers run, of which all but the last have the usual priority only:

- `off`: no draft-ahead. `open`: draft-ahead without the throttle. `throttle`: with it.
- `idle priority`: with the throttle, at idle priority.

Each prompt is completed with every draft worker before the next one, in random order, at gamma 4. Speeds are
tokens/s of a whole completion without Ray Serve and the public API; ratios are those of one round.
"""

from __future__ import annotations

# First of all: the orchestrator's package sets what gRPC reads when it is imported.
from benchmarks.timed_stack import Stack, connected_stack, worker_process

# isort: split
import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cluster import run_or_exit
from benchmarks.provenance import write_result
from gammaray import GenerationRequest, SamplingParams
from gammaray.bench.tables import plain_table
from gammaray.bench.workloads import prompts
from orchestrator.launcher.redis_server import RedisServer

OFF, OPEN, THROTTLE, IDLE = "off", "open", "throttle", "idle priority"
VARIANTS = (OFF, OPEN, THROTTLE, IDLE)
GAMMA, MAX_TOKENS = 4, 160


def run_worker(variant: str) -> int:
    """Run a draft worker of a variant in this process."""
    from services.draft import lookahead
    from services.draft.__main__ import main as draft_main

    if variant != IDLE:
        lookahead.can_give_way = lambda: False
    if variant in (OFF, OPEN):
        lookahead.Throttle.is_open = variant == OPEN  # a property otherwise
    sys.argv[1:] = []
    return draft_main()


async def speed(stack: Stack, text: str, temperature: float, seed: int) -> float:
    """Complete a prompt and return tokens/s."""
    request = GenerationRequest(
        prompt=text,
        max_tokens=MAX_TOKENS,
        sampling=SamplingParams(temperature=temperature, seed=seed),
        ignore_eos=True,
    )
    began = time.perf_counter()
    await stack.run(request, GAMMA)
    return MAX_TOKENS / (time.perf_counter() - began)


async def measure(placement: str, target_core: str, draft_core: str, rounds: int) -> dict[str, Any]:
    """Run all variants on the given cores and return the speeds."""
    texts = prompts("mixed", rounds)
    speeds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    async with AsyncExitStack() as exits:
        directory = exits.enter_context(tempfile.TemporaryDirectory())
        redis = exits.enter_context(RedisServer.start(Path(directory)))
        target, _ = exits.enter_context(worker_process("target", cores=target_core))
        stacks = {}
        for variant in VARIANTS:
            options = ("--worker", variant)
            draft, _ = exits.enter_context(
                worker_process("draft", *options, module="benchmarks.throttle", cores=draft_core)
            )
            stacks[variant] = await exits.enter_async_context(connected_stack(redis.url, target, draft, {}))
        for number in range(-2, rounds):  # two warm-ups
            for variant in random.Random(number).sample(VARIANTS, len(VARIANTS)):
                found = await speed(stacks[variant], texts[number], number % 2, abs(number))
                if number >= 0:
                    speeds[variant].append(found)
    return {
        "placement": placement,
        "rows": [
            {
                "variant": variant,
                "tokens_per_s": statistics.median(speeds[variant]),
                "over_off": statistics.median(
                    own / off for own, off in zip(speeds[variant], speeds[OFF], strict=True)
                ),
                "values": speeds[variant],
            }
            for variant in VARIANTS
        ],
    }


async def measure_all(rounds: int) -> dict[str, Any]:
    """Run both placements of the workers."""
    cores = sorted(map(str, os.sched_getaffinity(0)))
    if len(cores) < 2:
        raise SystemExit("failed: needs two cores")
    points = [
        await measure("one core for both workers", cores[0], cores[0], rounds),
        await measure("a core each", cores[0], cores[1], rounds),
    ]
    return {"gamma": GAMMA, "tokens": MAX_TOKENS, "rounds": rounds, "points": points}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--worker", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args(argv)
    if options.worker:
        sys.exit(run_worker(options.worker))
    result = run_or_exit(measure_all(options.rounds))
    table = plain_table(f"Draft-ahead at gamma {GAMMA}", ("workers on", "draft-ahead", "tok/s", "x off"))
    for point in result["points"]:
        for row in point["rows"]:
            cells = (f"{row['tokens_per_s']:.0f}", f"{row['over_off']:.2f}")
            table.add_row(point["placement"], row["variant"], *cells)
    Console().print(table)
    print(f"written to {write_result('throttle', result, options.out)}")


if __name__ == "__main__":
    main()
