"""Adaptive gamma and fixed gammas in turn on a real cluster, with one and with many sessions in flight.

    python -m benchmarks.loads                                   # about half an hour
    python -m benchmarks.loads --sessions 1 --repetitions 2      # a part of it

A share is tokens per second over those of the fastest fixed gamma, by repetition; medians are reported. The
fastest is known only afterwards, so its luck counts for it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.cluster import connected, run_or_exit
from benchmarks.provenance import write_result
from gammaray.bench.loops import without_loops
from gammaray.bench.measure import PLAIN, differences, measure, speeds
from gammaray.bench.systems import Ask, Stack, System
from gammaray.bench.tables import plain_table
from gammaray.bench.workloads import prompts
from gammaray.demo_pair import DEMO_PAIR

__all__ = ["shares"]

WORKLOADS = ("repetitive", "prose", "mixed")


def shares(values: dict[str, Sequence[float]], fixed: Sequence[str]) -> tuple[str, dict[str, float]]:
    """Return the fastest of the fixed systems, and the median share of its speed that each system reaches."""
    best = max(fixed, key=lambda name: statistics.median(values[name]))
    ratios = {
        name: statistics.median(ours / theirs for ours, theirs in zip(own, values[best], strict=True))
        for name, own in values.items()
    }
    return best, ratios


async def _run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    points = []
    pair = ("--target", options.target, "--draft", options.draft)
    async with connected(*pair) as client:
        fixed: list[System] = [Stack(gamma, client) for gamma in options.gammas.split(",")]
        systems = [*fixed, Stack("adaptive", client)]
        names = [system.name for system in fixed]
        with Progress(console=console, transient=True) as progress:
            for sessions in map(int, options.sessions.split(",")):
                for workload in options.workloads.split(","):
                    for temperature in (0.0, 1.0):
                        texts = prompts(workload, options.prompts)
                        asks = [
                            Ask(text, options.tokens, temperature, seed) for seed, text in enumerate(texts)
                        ]
                        task = progress.add_task(f"{workload}, {sessions} in flight", total=None)
                        samples = await measure(
                            systems, asks, options.repetitions, lambda t=task: progress.advance(t), sessions
                        )
                        progress.remove_task(task)
                        values = {system.name: speeds(samples[system.name]) for system in systems}
                        best, ratios = shares(values, names)
                        equality = differences(samples, {s.name: PLAIN for s in systems if s.name != PLAIN})
                        point = {
                            "sessions": sessions,
                            "workload": workload,
                            "temperature": temperature,
                            "best": best,
                            "shares": ratios,
                            "tokens_per_s": {name: list(found) for name, found in values.items()},
                            "equality": equality,
                            "loops": without_loops(samples)[1],
                        }
                        points.append(point)
                        title = f"{workload}, temperature {temperature:g}, {sessions} in flight, best {best}"
                        table = plain_table(title, ("system", "tokens/s", "share"))
                        for name, ratio in ratios.items():
                            table.add_row(name, f"{statistics.median(values[name]):.0f}", f"{ratio:.3f}")
                        console.print(table)
    settings = {key: str(value) for key, value in vars(options).items()}
    return {"settings": settings, "points": points}


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Adaptive gamma and fixed gammas under load.")
    parser.add_argument("--target", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--draft", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--gammas", default="0,2,4,6,8", help="fixed ones, comma-separated; 0 among them")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated")
    parser.add_argument("--sessions", default="1,8,64", help="in flight, comma-separated")
    parser.add_argument("--prompts", type=int, default=4, help="number of prompts per workload")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per completion")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args()
    result = run_or_exit(_run(options, Console()))
    print(f"written: {write_result('loads', result, options.out)}")


if __name__ == "__main__":
    main()
