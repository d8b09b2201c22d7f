"""Plain decoding, gammaray and the peers from `transformers`, in one go on the same pair.

    python -m benchmarks.run            # about ten minutes; `make bench`
    python -m benchmarks.run --quick    # about a minute, to see that it works

Starts a cluster on loopback, asks it as a client would, and in between asks a process that runs
`transformers` on one thread. Checks on the way that gammaray's greedy tokens equal those of `generate`, and
that its tokens at temperature 1 do not depend on gamma. Exits with 1 when a token differs.
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

from benchmarks.baselines import Baselines, running_baselines
from benchmarks.cluster import connected, run_or_exit
from benchmarks.measure import PLAIN, REFERENCE, differences, measure, row
from benchmarks.probe import cycle_cost, running_probe
from benchmarks.provenance import write_result
from benchmarks.report import cycle_cost_table, markdown, rich_table
from benchmarks.systems import Ask, Gamma, Peer, Stack, System
from benchmarks.workloads import WORKLOADS, fingerprint, prompts
from gammaray import AsyncClient
from gammaray.config import DEMO_PAIR
from services.engine.model import resolve_model

__all__ = ["Settings", "run"]

_PEERS = (REFERENCE, "assisted-4", "assisted-8", "lookup-4")
_COST_GAMMAS = (0, 4)
_COST_TOKENS = 96


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
    gammas: tuple[Gamma, ...]


async def run(settings: Settings, console: Console) -> dict[str, Any]:
    """Run the whole comparison and return its result, JSON-ready.

    Raises:
        ClusterError: The cluster did not start, or left processes behind.
        GammarayError: A completion failed.
    """
    texts = prompts(settings.workload, settings.num_prompts)
    console.print("starting transformers and the cluster ...")
    async with (
        running_baselines(settings.target, settings.draft) as baselines,
        connected("--target", settings.target, "--draft", settings.draft) as client,
    ):
        tables = await _compare(settings, texts, baselines, client, console)
        costs = await _cycle_costs(settings, texts[0], client)
    console.print(cycle_cost_table(costs))
    return {
        "settings": asdict(settings),
        "workload_fingerprint": fingerprint(texts),
        "temperatures": tables,
        "cycle_costs": costs,
    }


async def _compare(
    settings: Settings, texts: Sequence[str], baselines: Baselines, client: AsyncClient, console: Console
) -> list[dict[str, Any]]:
    systems: list[System] = [Peer(name, baselines) for name in _PEERS]
    systems += [Stack(gamma, client) for gamma in settings.gammas]
    tables = []
    with Progress(console=console, transient=True) as progress:
        for temperature in settings.temperatures:
            asks = [Ask(text, settings.max_tokens, temperature, seed) for seed, text in enumerate(texts)]
            total = len(systems) * len(asks) * settings.repetitions
            task = progress.add_task(f"temperature {temperature:g}", total=total)
            samples = await measure(
                systems, asks, settings.repetitions, lambda task=task: progress.advance(task)
            )
            rows = [row(system.name, samples) for system in systems]
            equality = differences(samples, _references(systems, temperature))
            console.print(rich_table(f"temperature {temperature:g}, {settings.workload}", rows))
            console.print(f"same tokens: {equality['equal']} of {equality['compared']}")
            tables.append({"temperature": temperature, "rows": rows, "equality": equality})
    return tables


def _references(systems: Sequence[System], temperature: float) -> dict[str, str]:
    """Return whose tokens each system must reproduce: at temperature 0 generate's, above it gamma 0's."""
    reference = REFERENCE if temperature == 0 else PLAIN
    ours = [system.name for system in systems if isinstance(system, Stack)]
    return {name: reference for name in ours if name != reference}


async def _cycle_costs(settings: Settings, text: str, client: AsyncClient) -> list[dict[str, Any]]:
    prompt = AutoTokenizer.from_pretrained(resolve_model(settings.target, "target"))(text).input_ids
    costs = []
    async with running_probe(client) as probe:
        for gamma in _COST_GAMMAS:
            stack, cycles, probed = Stack(gamma, client), [], []
            for _ in range(settings.repetitions + 1):
                sample = await stack.sample(Ask(text, _COST_TOKENS))
                assert sample.summary is not None
                assert sample.first_token_s is not None
                decoding_s = sample.seconds - sample.first_token_s
                cycles.append(decoding_s * 1e3 / (sample.summary.cycles - 1))
                probed += await probe.run(prompt, gamma, sample.summary.cycles - 1)
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
        temperatures=(0.0, 1.0),
        gammas=(0, 4, "adaptive") if quick else (0, 2, 4, 6, 8, "adaptive"),
    )


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="gammaray beside plain decoding and the peers.")
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
    print(f"written: {write_result(options.name, result, options.out)}")
    if options.markdown:
        for table in result["temperatures"]:
            print(f"\ntemperature {table['temperature']:g}\n\n{markdown(table['rows'])}")
    equalities = [table["equality"] for table in result["temperatures"]]
    sys.exit(any(equality["compared"] != equality["equal"] for equality in equalities))


if __name__ == "__main__":
    main()
