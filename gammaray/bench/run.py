"""One run of `gammaray bench`: every temperature in turn; gamma 0 is always one of the systems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gammaray.bench.loops import without_loops
from gammaray.bench.measure import PLAIN, Samples, differences, measure
from gammaray.bench.prompts import fingerprint
from gammaray.bench.rows import row
from gammaray.bench.systems import Ask, Stack
from gammaray.client.async_client import AsyncClient

Point = dict[str, Any]


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a run, recorded in the result file."""

    workload: str  # source of the prompts
    max_tokens: int  # tokens per completion; end-of-sequence tokens are ignored
    repetitions: int
    gammas: tuple[str, ...]  # in the format of `parse_gamma`; gamma 0 is added
    temperatures: tuple[float, ...]


async def run_bench(
    client: AsyncClient,
    settings: BenchSettings,
    tasks: Sequence[tuple[str, str]],
    advance: Callable[[], None],
    show: Callable[[Point], None],
) -> dict[str, Any]:
    """Run the benchmark on prompts, each after its category; `show` each point, return the result."""
    categories, texts = [category for category, _ in tasks], [text for _, text in tasks]
    processes = await client.status()
    models = {process.role: process.model for process in processes if process.model}
    points = []
    systems = [Stack(gamma, client) for gamma in dict.fromkeys(("0", *settings.gammas))]
    for temperature in settings.temperatures:
        asks = [Ask(text, settings.max_tokens, temperature, seed) for seed, text in enumerate(texts)]
        samples = await measure(systems, asks, settings.repetitions, advance)
        kept, loops = without_loops(samples)
        point = {
            "temperature": temperature,
            "rows": [row(system.name, kept) for system in systems],
            "equality": differences(samples, {name: PLAIN for name in samples if name != PLAIN}),
            "loops": loops,
            "categories": _by_category(kept, [categories[i] for i in loops["kept"]]),
        }
        show(point)
        points.append(point)
    return {
        "models": models,
        "settings": asdict(settings),
        "workload_fingerprint": fingerprint(texts),
        "points": points,
    }


def _by_category(samples: Samples, categories: Sequence[str]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for category in dict.fromkeys(categories):
        part = {
            system: [
                [turn for turn, name in zip(turns, categories, strict=True) if name == category]
                for turns in repetitions
            ]
            for system, repetitions in samples.items()
        }
        found[category] = {system: row(system, part)["over_plain"]["median"] for system in part}
    return found
