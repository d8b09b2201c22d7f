"""See it work: start a cluster with the demo pair, stream a completion, measure the speedup.

    make demo        # python -m benchmarks.demo

The speedup is over plain decoding (gamma 0) through the same stack, in the same run: several prompts, gamma 0
and adaptive in turn, tokens compared. Exits with 1 when a token differs or anything fails, and leaves no
process behind.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.cluster import connected, run_or_exit
from benchmarks.workloads import prompts
from gammaray import AsyncClient
from gammaray.bench.systems import Ask, Sample, Stack
from gammaray.bench.tables import plain_table
from gammaray.cli.render import STYLES, OriginPainter, print_legend
from gammaray.types import SpeculationSummary

__all__ = ["Comparison", "compare", "demo"]

PROMPT = "def read_lines(path):"
_TEMPERATURES = (0.0, 0.7)
_STREAM_TEMPERATURE = 0.7


@dataclass(frozen=True)
class Comparison:
    """Plain and speculative completions of the same prompts, `[prompt][repetition]`."""

    temperature: float
    plain: list[list[Sample]]
    speculative: list[list[Sample]]

    @property
    def speedup(self) -> float:
        """Median over prompts of plain over speculative seconds."""
        pairs = zip(self.plain, self.speculative, strict=True)
        return statistics.median(_seconds(plain) / _seconds(fast) for plain, fast in pairs)

    @property
    def num_different(self) -> int:
        """Prompts that did not give one and the same tokens every time."""
        pairs = zip(self.plain, self.speculative, strict=True)
        return sum(len({sample.token_ids for sample in plain + fast}) > 1 for plain, fast in pairs)

    @property
    def summaries(self) -> list[SpeculationSummary]:
        """Summaries of the speculative completions."""
        return [s.summary for samples in self.speculative for s in samples if s.summary is not None]


async def demo(console: Console, num_prompts: int, max_tokens: int) -> int:
    """Run the demo and return the exit code.

    Raises:
        ClusterError: The cluster did not start, or left processes behind.
        GammarayError: A completion failed.
    """
    console.print("Starting Redis, Ray Serve, an orchestrator, one draft and one target worker ...")
    async with connected() as client:
        await _stream(client, console, max_tokens)
        texts = [PROMPT, *prompts("code", num_prompts - 1)]
        comparisons = []
        with Progress(console=console, transient=True) as progress:
            for temperature in _TEMPERATURES:
                asks = [Ask(text, max_tokens, temperature, seed) for seed, text in enumerate(texts)]
                task = progress.add_task(f"measuring at temperature {temperature:g}", total=len(asks))
                comparisons.append(await compare(client, asks, partial(progress.advance, task)))
        console.print(_table(comparisons, max_tokens))
    for comparison in comparisons:
        console.print(
            f"temperature {comparison.temperature:g}: speedup over plain decoding "
            f"[bold]{comparison.speedup:.2f}x[/], "
            f"same tokens for {len(texts) - comparison.num_different} of {len(texts)} prompts",
            soft_wrap=True,
        )
    return int(any(comparison.num_different for comparison in comparisons))


async def _stream(client: AsyncClient, console: Console, max_tokens: int) -> None:
    """Stream one completion, each token in the colour of its origin."""
    print_legend(console)
    painter = OriginPainter()
    console.print(PROMPT, style="bold", end="", markup=False, highlight=False)
    async for chunk in client.generate(
        PROMPT, max_tokens=max_tokens, temperature=_STREAM_TEMPERATURE, seed=1
    ):
        for text, origin in painter.runs(chunk):
            console.print(text, style=STYLES[origin], end="", markup=False, highlight=False, soft_wrap=True)
    console.print("\n")


async def compare(
    client: AsyncClient, asks: Sequence[Ask], advance: Callable[[], None], repetitions: int = 2
) -> Comparison:
    """Complete each prompt plainly and speculatively in turn; the first two also before, to warm up."""
    plain, speculative = Stack(0, client), Stack("adaptive", client)
    for ask in asks[:2]:
        for system in (plain, speculative):
            await system.sample(ask)
    made: dict[str, list[list[Sample]]] = {plain.name: [], speculative.name: []}
    for ask in asks:
        for samples in made.values():
            samples.append([])
        for repetition in range(repetitions):
            # The one that goes first changes, so that neither always meets the other's leftovers.
            order = (plain, speculative) if repetition % 2 == 0 else (speculative, plain)
            for system in order:
                made[system.name][-1].append(await system.sample(ask))
        advance()
    return Comparison(asks[0].temperature, made[plain.name], made[speculative.name])


def _table(comparisons: Sequence[Comparison], max_tokens: int) -> Table:
    num_prompts = len(comparisons[0].plain)
    columns = ("T", "alpha", "tokens/cycle", "gamma", "plain tok/s", "tok/s", "speedup")
    table = plain_table(f"{num_prompts} prompts x {max_tokens} tokens, gamma 0 and adaptive in turn", columns)
    for comparison in comparisons:
        summaries = comparison.summaries
        alphas = [summary.alpha for summary in summaries if summary.alpha is not None]
        table.add_row(
            f"{comparison.temperature:g}",
            f"{statistics.median(alphas):.2f}" if alphas else "none tested",
            f"{statistics.median(summary.tokens_per_cycle for summary in summaries):.2f}",
            f"{statistics.median(summary.gamma_mean for summary in summaries):.2f}",
            f"{_median_speed(comparison.plain):.0f}",
            f"{_median_speed(comparison.speculative):.0f}",
            f"{comparison.speedup:.2f}x",
        )
    return table


def _seconds(samples: Sequence[Sample]) -> float:
    return sum(sample.seconds for sample in samples)


def _median_speed(per_prompt: Sequence[Sequence[Sample]]) -> float:
    return statistics.median(
        sum(len(sample.token_ids) for sample in samples) / _seconds(samples) for samples in per_prompt
    )


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Start a cluster, stream a completion, measure the speedup.")
    parser.add_argument("--prompts", type=int, default=6, help="number of prompts measured")
    parser.add_argument("--tokens", type=int, default=192, help="tokens per completion")
    options = parser.parse_args()
    sys.exit(run_or_exit(demo(Console(), options.prompts, options.tokens)))


if __name__ == "__main__":
    main()
