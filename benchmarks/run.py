"""The gammas of a pair with a draft model, as chains, trees and adaptive, in one go.

    python -m benchmarks.run            # some ten minutes; `make bench` without a real model
    python -m benchmarks.run --quick    # about a minute, to see that it works

Starts a cluster on loopback and asks it as a client would. Prints speed and latency, where the time of a
cycle goes, and what the draft costs in memory. Checks that the tokens do not depend on gamma; exits with 1
when one differs. `benchmarks.peers` compares with other programs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer

from benchmarks.chart import by_gamma, write_chart
from benchmarks.cluster import connected, run_or_exit
from benchmarks.memory import memory_overhead, memory_table
from benchmarks.probe import cycle_cost, cycle_cost_table, running_probe
from benchmarks.provenance import write_result
from gammaray import AsyncClient
from gammaray.bench.loops import loops_line, without_loops
from gammaray.bench.measure import PLAIN, differences, measure
from gammaray.bench.optimum import optimum
from gammaray.bench.rows import row
from gammaray.bench.systems import Ask, Stack, parse_gamma
from gammaray.bench.tables import latency_table, markdown, speed_table, split_table
from gammaray.bench.workloads import WORKLOADS, fingerprint, prompts
from gammaray.demo_pair import DEMO_PAIR, resolve_model

__all__ = ["Settings", "run"]

_COST_TOKENS = 96
_GAMMAS = ("0", "2", "4", "6", "8", "4x12", "6x16", "adaptive")
_QUICK_GAMMAS = ("0", "4", "4x12", "adaptive")


@dataclass(frozen=True)
class Settings:
    """What is run; stands in the result file."""

    target: str
    draft: str
    workload: str
    num_prompts: int
    max_tokens: int
    repetitions: int
    temperatures: tuple[float, ...]
    gammas: tuple[str, ...]


async def run(settings: Settings, console: Console) -> dict[str, Any]:
    """Run the whole comparison and return its result, JSON-ready.

    Raises:
        ClusterError: The cluster did not start, or did not end all of its processes.
        GammarayError: A completion failed.
    """
    texts = prompts(settings.workload, settings.num_prompts)
    console.print("starting the cluster ...")
    async with connected("--target", settings.target, "--draft", settings.draft) as client:
        points = await _compare(settings, texts, client, console)
        costs = await _cycle_costs(settings, texts[0], client)
        policies = [parse_gamma(gamma) for gamma in settings.gammas]
        max_nodes = max(max(policy.fixed or 0, policy.max_nodes) for policy in policies)
        processes = await client.status()
        memory = memory_overhead(settings.target, settings.draft, processes, max_nodes)
    console.print(cycle_cost_table(costs))
    console.print(memory_table(memory))
    return {
        "settings": asdict(settings),
        "workload_fingerprint": fingerprint(texts),
        "points": points,
        "cycle_costs": costs,
        "memory": memory,
    }


async def _compare(
    settings: Settings, texts: Sequence[str], client: AsyncClient, console: Console
) -> list[dict[str, Any]]:
    systems = [Stack(gamma, client) for gamma in settings.gammas]
    references = {system.name: PLAIN for system in systems if system.name != PLAIN}
    points = []
    with Progress(console=console, transient=True) as progress:
        for temperature in settings.temperatures:
            asks = [Ask(text, settings.max_tokens, temperature, seed) for seed, text in enumerate(texts)]
            total = len(systems) * len(asks) * settings.repetitions
            task = progress.add_task(f"temperature {temperature:g}", total=total)
            samples = await measure(
                systems, asks, settings.repetitions, lambda task=task: progress.advance(task)
            )
            kept, loops = without_loops(samples)
            rows = [row(name, kept, {"over_plain": PLAIN}) for name in kept]
            equality = differences(samples, references)
            point = {
                "temperature": temperature,
                "verification": "coupled",
                "concurrency": 1,
                "rows": rows,
                "equality": equality,
                "optimum": optimum(rows),
                "loops": loops,
            }
            _show(console, f"temperature {temperature:g}, {settings.workload}", point)
            points.append(point)
    return points


def _show(console: Console, title: str, point: dict[str, Any]) -> None:
    rows, equality = point["rows"], point["equality"]
    console.print(speed_table(title, rows))
    console.print(latency_table(rows))
    console.print(split_table(rows))
    if best := point["optimum"]:
        console.print(
            f"best: {best['best_system']}; best chain: gamma {best['gamma_measured']} measured, "
            f"{best['gamma_predicted']} predicted",
            soft_wrap=True,
        )
    if line := loops_line(point["loops"]):
        console.print(line, soft_wrap=True)
    console.print(f"same tokens: {equality['equal']} of {equality['compared']}\n")


async def _cycle_costs(settings: Settings, text: str, client: AsyncClient) -> list[dict[str, Any]]:
    prompt = AutoTokenizer.from_pretrained(resolve_model(settings.target, "target"))(text).input_ids
    costs = []
    async with running_probe(client) as probe:
        for gamma in settings.gammas:
            policy = parse_gamma(gamma)
            if policy.fixed is None:
                continue
            stack, cycles, probed = Stack(gamma, client), [], []
            for _ in range(min(3, settings.repetitions) + 1):
                sample = await stack.sample(Ask(text, _COST_TOKENS))
                assert sample.summary is not None
                arrived = [at for at, _ in sample.arrivals]
                cycles += [(arrived[-1] - arrived[0]) * 1e3 / (len(arrived) - 1)]
                probed += await probe.run(prompt, policy, sample.summary.cycles - 1)
            costs.append(cycle_cost(gamma, cycles, probed))
    return costs


def _settings(options: argparse.Namespace) -> Settings:
    quick = options.quick
    return Settings(
        target=options.target,
        draft=options.draft,
        workload=options.workload,
        num_prompts=options.prompts or (2 if quick else 6),
        max_tokens=options.tokens or (32 if quick else 128),
        repetitions=options.repetitions or (2 if quick else 5),
        temperatures=(0.0, 0.7, 1.0),
        gammas=_QUICK_GAMMAS if quick else _GAMMAS,
    )


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="The gammas of a pair, compared with plain decoding.")
    parser.add_argument("--quick", action="store_true", help="a small run")
    parser.add_argument("--target", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--draft", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--workload", choices=WORKLOADS, default="mixed")
    parser.add_argument("--prompts", type=int, help="number of prompts")
    parser.add_argument("--tokens", type=int, help="tokens per completion")
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown, too")
    parser.add_argument("--name", default="run", help="beginning of the result file's name")
    parser.add_argument(
        "--out", type=Path, help="result file (default: benchmarks/results/<name>-<date>.json)"
    )
    options = parser.parse_args()
    result = run_or_exit(run(_settings(options), Console()))
    path = write_result(options.name, result, options.out)
    print(f"written: {path}")
    print(f"written: {write_chart(path, by_gamma(result, f'{options.target}: speed over plain decoding'))}")
    if options.markdown:
        for point in result["points"]:
            print(f"\ntemperature {point['temperature']:g}\n\n{markdown(point['rows'])}")
    equalities = [point["equality"] for point in result["points"]]
    sys.exit(any(equality["compared"] != equality["equal"] for equality in equalities))


if __name__ == "__main__":
    main()
