"""`gammaray bench`: measure a running cluster, with gamma 0 in the same run for comparison."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from gammaray.bench.prompts import NUM_PROMPTS, own_prompts
from gammaray.bench.provenance import write_result
from gammaray.bench.run import BenchSettings, run_bench
from gammaray.bench.systems import parse_gamma
from gammaray.bench.tables import show_point
from gammaray.cli.options import connection_options
from gammaray.program.output import output_console
from gammaray.program.prompts import read_prompts
from gammaray.program.values import GIVEN_FILE, NEW_FILE, IntRange, list_of, temperature


def _gamma(text: str) -> str:
    parse_gamma(text)
    return text


@click.command()
@connection_options(timeout_s=600.0)
@click.option(
    *("--prompts", "num_prompts"),
    type=IntRange(1, NUM_PROMPTS),
    default=4,
    help="Number of own prompts: code, prose and repetitive text in turn.",
)
@click.option(
    "--prompt-file", type=GIVEN_FILE, help="Prompts to use instead: one per line, or a JSON list of strings."
)
@click.option("--tokens", type=IntRange(2), default=128, help="Per completion.")
@click.option("--repeats", type=IntRange(1), default=5)
@click.option(
    "--gammas",
    default="2,4,8,adaptive",
    callback=list_of(_gamma, "0 to 64, depth x nodes such as 4x16, adaptive"),
    help="Depths of chains, depth x nodes for trees, adaptive; gamma 0 is always measured.",
)
@click.option("--temperatures", default="0,1", callback=list_of(temperature, "numbers such as 0 or 0.7"))
@click.option("--json", "out", type=NEW_FILE, help="File for the result.")
def bench(**options: Any) -> None:
    """Measure a running cluster: speed, acceptance and latency by gamma.

    Each prompt is completed by every system before the next prompt; ratios are taken within a repetition.
    """
    found, workload = own_prompts(options["num_prompts"]), "own"
    if (path := options["prompt_file"]) is not None:
        found, workload = [("given", text) for text in read_prompts(path, "--prompt-file")], path.name
    settings = BenchSettings(
        workload=workload,
        max_tokens=options["tokens"],
        repetitions=options["repeats"],
        gammas=options["gammas"],
        temperatures=options["temperatures"],
    )
    console = output_console()
    completions = len({"0", *settings.gammas}) * settings.repetitions * len(found)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("completions", total=completions * len(settings.temperatures))
        result = options["connection"].call(
            lambda client: run_bench(
                *(client, settings, found),
                advance=lambda: progress.advance(task),
                show=lambda point: show_point(console, point),
            )
        )
    if options["out"] is not None:
        click.echo(f"written: {write_result('bench', result, options['out'])}")
