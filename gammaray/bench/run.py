"""One run of `gammaray bench`: every load in turn; gamma 0 is always one of the systems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from gammaray.bench.loops import without_loops
from gammaray.bench.measure import PLAIN, Samples, differences, measure
from gammaray.bench.rows import row
from gammaray.bench.systems import Ask, Stack
from gammaray.bench.workloads import fingerprint
from gammaray.client.async_client import AsyncClient
from gammaray.types import VerificationMethod

Point = dict[str, Any]


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a run, recorded in the result file.

    Attributes:
        workload: Name of the prompt set, or the source of the prompts.
        max_tokens: Tokens per completion; end-of-sequence tokens are ignored.
        repetitions: Repetitions, and so values per metric.
        gammas: In the format of `parse_gamma`; gamma 0 is added.
        temperatures: Temperatures to measure.
        verifications: Verification methods to measure at each temperature.
        concurrencies: Numbers of completions in flight to measure with each of these.
    """

    workload: str
    max_tokens: int
    repetitions: int
    gammas: tuple[str, ...]
    temperatures: tuple[float, ...]
    verifications: tuple[str, ...]
    concurrencies: tuple[int, ...]

    @property
    def loads(self) -> list[tuple[float, str, int]]:
        """Temperature, verification and concurrency of every point."""
        return list(product(self.temperatures, self.verifications, self.concurrencies))


async def run_bench(
    client: AsyncClient,
    settings: BenchSettings,
    tasks: Sequence[tuple[str, str]],
    begin: Callable[[str], Callable[[], None]],
    show: Callable[[Point], None],
) -> dict[str, Any]:
    """Run the benchmark and return the result, JSON-ready.

    Args:
        client: Connected to the cluster.
        settings: What to measure.
        tasks: The prompts, each after the name of its category.
        begin: Called with each point's name; returns a callback that is called after each of its completions.
        show: Called with each finished point.

    Raises:
        GammarayError: A completion failed.
    """
    categories, texts = [category for category, _ in tasks], [text for _, text in tasks]
    processes = await client.status()
    models = {process.role: process.model for process in processes if process.model}
    points = []
    for temperature, verification, concurrency in settings.loads:
        name = f"temperature {temperature:g}, {verification}, {concurrency} in flight"
        gammas = dict.fromkeys(("0", *settings.gammas))
        systems = [Stack(gamma, client, VerificationMethod(verification)) for gamma in gammas]
        asks = [Ask(text, settings.max_tokens, temperature, seed) for seed, text in enumerate(texts)]
        samples = await measure(systems, asks, settings.repetitions, begin(name), concurrency)
        kept, loops = without_loops(samples)
        rows = [row(system.name, kept) for system in systems]
        point = {
            "temperature": temperature,
            "verification": verification,
            "concurrency": concurrency,
            "rows": rows,
            "equality": _equality(samples, verification, temperature),
            "loops": loops,
            "categories": _by_category(kept, [categories[i] for i in loops["kept"]], concurrency),
        }
        show(point)
        points.append(point)
    return {
        "models": models,
        "settings": asdict(settings),
        "workload_fingerprint": fingerprint(texts),
        "points": points,
    }


def _by_category(
    samples: Samples, categories: Sequence[str], concurrency: int
) -> dict[str, dict[str, float]]:
    """Return each system's speed over gamma 0 by category; empty if a turn has several completions."""
    found: dict[str, dict[str, float]] = {}
    for category in dict.fromkeys(categories) if concurrency == 1 else ():
        part = {
            system: [
                [turn for turn, name in zip(turns, categories, strict=True) if name == category]
                for turns in repetitions
            ]
            for system, repetitions in samples.items()
        }
        found[category] = {system: row(system, part)["over_plain"]["median"] for system in part}
    return found


def _equality(samples: Any, verification: str, temperature: float) -> dict[str, Any] | None:
    """Compare tokens with gamma 0 where they must be equal; other methods match in distribution only."""
    if verification != VerificationMethod.COUPLED.value and temperature > 0:
        return None
    return differences(samples, {name: PLAIN for name in samples if name != PLAIN})
