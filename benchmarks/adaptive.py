"""Adaptive gamma compared with every fixed one, chains and trees, on three workloads in one run.

    python -m benchmarks.adaptive            # about twenty minutes
    python -m benchmarks.adaptive --quick    # about a minute, to see that it works

The best fixed shape is only known afterwards: `ratio` sets adaptive against the one that turned out fastest
in this very run, whose luck counts for it; `held_out` against the one that was fastest in the other
repetitions, as somebody would have to choose. Both are medians over repetitions.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.cluster import connected, run_or_exit
from benchmarks.provenance import write_result
from gammaray import AsyncClient
from gammaray.bench.loops import without_loops
from gammaray.bench.measure import PLAIN, Median, differences, measure
from gammaray.bench.optimum import optimum
from gammaray.bench.rows import Row, row
from gammaray.bench.systems import Ask, Stack, stack_name
from gammaray.bench.tables import plain_table, speed_table
from gammaray.bench.workloads import fingerprint, prompts
from gammaray.demo_pair import DEMO_PAIR

__all__ = ["Settings", "regret", "run"]

ADAPTIVE = stack_name("adaptive")
WORKLOADS = {"repetitive": ("repetitive", 0.0), "prose": ("prose", 0.0), "hot": ("mixed", 1.2)}
"""Name -> set of prompts, and temperature."""

_SHAPES = ("0", "1", "2", "3", "4", "6", "8", "3x8", "4x12", "6x16")
_QUICK_SHAPES = ("0", "2", "4", "4x12")


@dataclass(frozen=True)
class Settings:
    """What is run; stands in the result file."""

    target: str
    draft: str
    num_prompts: int
    max_tokens: int
    repetitions: int
    shapes: tuple[str, ...]


async def run(settings: Settings, console: Console) -> dict[str, Any]:
    """Run the three workloads and return the result, JSON-ready.

    Raises:
        ClusterError: The cluster did not start, or did not end all of its processes.
        GammarayError: A completion failed.
    """
    texts = {name: prompts(source, settings.num_prompts) for name, (source, _) in WORKLOADS.items()}
    points = []
    async with connected("--target", settings.target, "--draft", settings.draft) as client:
        with Progress(console=console, transient=True) as progress:
            for name in WORKLOADS:
                point = await _workload(settings, name, texts[name], client, progress)
                console.print(speed_table(f"{name}, temperature {point['temperature']:g}", point["rows"]))
                points.append(point)
    console.print(_table(points))
    return {
        "settings": asdict(settings),
        "workload_fingerprint": fingerprint([text for group in texts.values() for text in group]),
        "points": points,
    }


async def _workload(
    settings: Settings, name: str, texts: Sequence[str], client: AsyncClient, progress: Progress
) -> dict[str, Any]:
    temperature = WORKLOADS[name][1]
    systems = [Stack(shape, client) for shape in (*settings.shapes, "adaptive")]
    asks = [Ask(text, settings.max_tokens, temperature, seed) for seed, text in enumerate(texts)]
    task = progress.add_task(name, total=len(systems) * len(asks) * settings.repetitions)
    samples = await measure(systems, asks, settings.repetitions, lambda: progress.advance(task))
    kept, loops = without_loops(samples)
    rows = [row(system.name, kept) for system in systems]
    return {
        "workload": name,
        "temperature": temperature,
        "verification": "coupled",
        "concurrency": 1,
        "rows": rows,
        "equality": differences(samples, {s.name: PLAIN for s in systems if s.name != PLAIN}),
        "optimum": optimum(rows),
        "adaptive": regret(rows),
        "loops": loops,
    }


def regret(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how adaptive gamma did against fixed shapes.

    Returns:
        `best`: the fixed shape of the highest median speed; `ratio`: adaptive over it; `held_out`: adaptive
        over the shape that was best in the other repetitions, None for a single one. Ratios are medians over
        repetitions, with the values.
    """
    speeds = {row["system"]: row["tokens_per_s"]["values"] for row in rows}
    adaptive = speeds.pop(ADAPTIVE)
    best = max(speeds, key=lambda name: statistics.median(speeds[name]))
    ratios = [ours / theirs for ours, theirs in zip(adaptive, speeds[best], strict=True)]
    held_out = []
    for i in range(len(adaptive) if len(adaptive) > 1 else 0):
        others = {name: values[:i] + values[i + 1 :] for name, values in speeds.items()}
        chosen = max(others, key=lambda name: statistics.median(others[name]))
        held_out.append(adaptive[i] / speeds[chosen][i])
    return {
        "best": best,
        "ratio": vars(Median.of(ratios)),
        "held_out": vars(Median.of(held_out)) if held_out else None,
    }


def _table(points: Sequence[dict[str, Any]]) -> Table:
    columns = (
        "workload",
        "T",
        "best fixed",
        "x gamma 0",
        "adaptive x gamma 0",
        "adaptive / best",
        "held out",
    )
    table = plain_table("Adaptive gamma and the best fixed shape", columns)
    for point in points:
        rows = {row["system"]: row for row in point["rows"]}
        found = point["adaptive"]
        over_plain = [f"{rows[name]['over_plain']['median']:.2f}" for name in (found["best"], ADAPTIVE)]
        ratios = [found[kind] for kind in ("ratio", "held_out")]
        table.add_row(
            point["workload"],
            f"{point['temperature']:g}",
            found["best"].removeprefix(stack_name("")),
            *over_plain,
            *("" if ratio is None else f"{ratio['median']:.3f}" for ratio in ratios),
        )
    return table


def _settings(options: argparse.Namespace) -> Settings:
    quick = options.quick
    return Settings(
        target=options.target,
        draft=options.draft,
        num_prompts=options.prompts or (1 if quick else 6),
        max_tokens=options.tokens or (32 if quick else 192),
        repetitions=options.repetitions or (2 if quick else 5),
        shapes=_QUICK_SHAPES if quick else _SHAPES,
    )


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Adaptive gamma compared with every fixed one.")
    parser.add_argument("--quick", action="store_true", help="a small run")
    parser.add_argument("--target", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--draft", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--prompts", type=int, help="number of prompts per workload")
    parser.add_argument("--tokens", type=int, help="tokens per completion")
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args()
    result = run_or_exit(run(_settings(options), Console()))
    print(f"written: {write_result('adaptive', result, options.out)}")


if __name__ == "__main__":
    main()
