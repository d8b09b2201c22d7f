"""See it work: start a cluster, stream a completion, measure the speedup.

    make demo        # python -m benchmarks.demo
    python -m benchmarks.demo --model demo-pair

It serves the real model of `make smollm2` and its trained head, if the model is in build/models/smollm2;
look-ups in the text and a predicted output propose, too. Otherwise it serves the demo pair, whose draft model
has a worker of its own. It prints which one it serves.

The speedup is over plain decoding (gamma 0) through the same stack, in the same run: several prompts, gamma 0
and adaptive in turn, tokens compared. Exits with 1 when a token differs or anything fails, and leaves no
process running.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.cluster import connected, run_or_exit
from benchmarks.prompts import load_tasks
from benchmarks.smollm2 import DIRECTORY, HEAD, HEAD_WEIGHTS
from benchmarks.workloads import prompts
from gammaray import AsyncClient
from gammaray.bench.measure import measure
from gammaray.bench.systems import Ask, Sample, Stack
from gammaray.bench.tables import plain_table
from gammaray.client.request import GenerateOptions
from gammaray.errors import InvalidArgumentError
from gammaray.types import SpeculationSummary
from orchestrator.text.tokenizer import Tokenizer

PROMPT = "def read_lines(path):"
MODELS = ("smollm2", "demo-pair")
_TEMPERATURES = (0.0, 0.7)
REPETITIONS = 2
_CATEGORIES = {
    "chat": "chat question",
    "summary": "summary",
    "edit": "edit with prediction",
}


@dataclass(frozen=True)
class Scene:
    """What a demo serves and asks.

    Args:
        about: The served model, for the user.
        target: As for `gammaray up`.
        draft: Likewise; None: no draft worker.
        tasks: Completions to measure, by the task's name; their temperatures are replaced.
        streamed: The text of the prompt that is streamed first, and its completion.
        options: Further options of each request.
        head: A head in the target worker.
        weights: Type of its weights.
    """

    about: str
    target: str
    draft: str | None
    tasks: Mapping[str, Sequence[Ask]]
    streamed: tuple[str, Ask]
    options: GenerateOptions = field(default_factory=GenerateOptions)
    head: str | None = None
    weights: str = "auto"


def default_model(directory: Path = DIRECTORY) -> str:
    """Return which of `MODELS` to serve: the real one if `make smollm2` has made it."""
    return MODELS[0] if (directory / "config.json").is_file() else MODELS[1]


def real_model(max_tokens: int, directory: Path = DIRECTORY) -> Scene:
    """Return the demo of SmolLM2 and its head: a task with nothing to copy, and two with much.

    Raises:
        InvalidArgumentError: The model is not there.
    """
    if default_model(directory) != "smollm2":
        allowed = f"demo-pair, since {directory} does not exist; `make smollm2` creates it"
        raise InvalidArgumentError("model", "smollm2", allowed)
    tokenizer = Tokenizer(str(directory))
    asks, texts = {}, {}
    for seed, task in enumerate(load_tasks([*_CATEGORIES], 1)):
        prompt = tuple(tokenizer.encode(tokenizer.render_chat(task.messages)))
        name = _CATEGORIES[task.category]
        asks[name] = [Ask(prompt, max_tokens, seed=seed, prediction=task.prediction or "")]
        texts[name] = task.text
    streamed = _CATEGORIES["edit"]
    return Scene(
        f"Model: SmolLM2-135M-Instruct from {directory}. A head trained for it, look-ups in "
        "the text and the request's prediction propose. --model demo-pair shows a pair with a draft worker.",
        str(directory),
        None,
        asks,
        (f"{texts[streamed]}\n", asks[streamed][0]),
        {"ignore_eos": False},
        str(HEAD),
        HEAD_WEIGHTS,
    )


def demo_pair(num_prompts: int, max_tokens: int) -> Scene:
    """Return the demo of the pair that ships with gammaray: prompts of Python code."""
    texts = [PROMPT, *prompts("code", num_prompts - 1)]
    asks = [Ask(text, max_tokens, seed=seed) for seed, text in enumerate(texts)]
    return Scene(
        "Model: the demo pair, two small models of Python code that ship with gammaray. `make smollm2` "
        "fetches a real chat model; `make demo` then serves that one.",
        "demo",
        "demo",
        {"Python code": asks},
        (PROMPT, replace(asks[0], temperature=0.7, seed=1)),
    )


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

    def part(self, start: int, stop: int) -> Comparison:
        """Return the comparison of some of the prompts."""
        return Comparison(self.temperature, self.plain[start:stop], self.speculative[start:stop])


async def demo(console: Console, scene: Scene) -> int:
    """Run the demo and return the exit code.

    Raises:
        ClusterError: The cluster did not start, or did not end all of its processes.
        GammarayError: A completion failed.
    """
    console.print(scene.about, soft_wrap=True, highlight=False)
    console.print("Starting Redis, Ray Serve, an orchestrator and its workers ...")
    asks = [ask for task in scene.tasks.values() for ask in task]
    comparisons = []
    async with connected(scene.target, scene.draft, scene.head, scene.weights) as client:
        await _stream(client, console, scene)
        with Progress(console=console, transient=True) as progress:
            for temperature in _TEMPERATURES:
                bar = progress.add_task(
                    f"measuring at temperature {temperature:g}", total=2 * REPETITIONS * len(asks)
                )
                hot = [replace(ask, temperature=temperature) for ask in asks]
                advance = partial(progress.advance, bar)
                comparisons.append(await compare(client, hot, advance, options=scene.options))
    console.print(results_table(scene, comparisons))
    for comparison in comparisons:
        console.print(
            f"temperature {comparison.temperature:g}: speedup over plain decoding "
            f"[bold]{comparison.speedup:.2f}x[/], "
            f"same tokens for {len(asks) - comparison.num_different} of {len(asks)} prompts",
            soft_wrap=True,
        )
    return int(any(comparison.num_different for comparison in comparisons))


async def _stream(client: AsyncClient, console: Console, scene: Scene) -> None:
    """Stream one completion."""
    text, ask = scene.streamed
    options: GenerateOptions = {**scene.options}
    if ask.prediction:
        options["prediction"] = ask.prediction
    console.print(text, style="bold", end="", markup=False, highlight=False)
    async for chunk in client.generate(
        ask.prompt, max_tokens=ask.max_tokens, temperature=ask.temperature, seed=ask.seed, **options
    ):
        console.print(chunk.text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print("\n")


async def compare(
    client: AsyncClient,
    asks: Sequence[Ask],
    advance: Callable[[], None],
    repetitions: int = REPETITIONS,
    options: GenerateOptions | None = None,
) -> Comparison:
    """Complete each prompt plainly and speculatively in turn; `advance` is called after each completion."""
    stacks = [Stack(gamma, client, options=options) for gamma in (0, "adaptive")]
    samples = await measure(stacks, asks, repetitions, advance)

    def by_prompt(stack: Stack) -> list[list[Sample]]:
        return [[turn.samples[0] for turn in turns] for turns in zip(*samples[stack.name], strict=True)]

    return Comparison(asks[0].temperature, *map(by_prompt, stacks))


def results_table(scene: Scene, comparisons: Sequence[Comparison]) -> Table:
    """Return the table of the demo: a row for each task and temperature."""
    columns = ("T", "task", "alpha", "tok/cycle", "cycles by drafter", "plain", "tok/s", "speedup")
    num_tokens = max(ask.max_tokens for asks in scene.tasks.values() for ask in asks)
    title = f"gamma 0 and adaptive in turn, up to {num_tokens} tokens, no prompt cached"
    table = plain_table(title, columns)
    for comparison in comparisons:
        start = 0
        for name, asks in scene.tasks.items():
            part = comparison.part(start, start + len(asks))
            start += len(asks)
            summaries = part.summaries
            alphas = [summary.alpha for summary in summaries if summary.alpha is not None]
            table.add_row(
                f"{part.temperature:g}",
                name if len(asks) == 1 else f"{name}, {len(asks)} prompts",
                f"{statistics.median(alphas):.2f}" if alphas else "none tested",
                f"{statistics.median(summary.tokens_per_cycle for summary in summaries):.2f}",
                _by_drafter(summaries),
                f"{_median_speed(part.plain):.0f}",
                f"{_median_speed(part.speculative):.0f}",
                f"{part.speedup:.2f}x",
            )
    return table


def _by_drafter(summaries: Sequence[SpeculationSummary]) -> str:
    """Return the shares of the cycles in which each drafter proposed."""
    total = sum(summary.cycles for summary in summaries)
    counts = {
        "model": sum(summary.model_cycles for summary in summaries),
        "head": sum(summary.head_cycles for summary in summaries),
        "suffix": sum(summary.suffix_cycles for summary in summaries),
        "prediction": sum(summary.prediction_cycles for summary in summaries),
        "none": sum(summary.plain_cycles for summary in summaries),
    }
    return ", ".join(f"{name} {count / total:.0%}" for name, count in counts.items() if count)


def _seconds(samples: Sequence[Sample]) -> float:
    return sum(sample.seconds for sample in samples)


def _median_speed(per_prompt: Sequence[Sequence[Sample]]) -> float:
    return statistics.median(
        sum(len(sample.token_ids) for sample in samples) / _seconds(samples) for samples in per_prompt
    )


async def _main(options: argparse.Namespace) -> int:
    if options.model == "smollm2":
        scene = real_model(options.tokens or 64)
    else:
        scene = demo_pair(options.prompts, options.tokens or 192)
    return await demo(Console(), scene)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Start a cluster, stream a completion, measure the speedup.")
    parser.add_argument(
        "--model",
        choices=MODELS,
        default=default_model(),
        help="default: smollm2 if `make smollm2` has made it, else demo-pair",
    )
    parser.add_argument("--prompts", type=int, default=6, help="number of prompts for the demo pair")
    parser.add_argument(
        "--tokens", type=int, help="tokens per completion; default: 64, or 192 for the demo pair"
    )
    sys.exit(run_or_exit(_main(parser.parse_args())))


if __name__ == "__main__":
    main()
