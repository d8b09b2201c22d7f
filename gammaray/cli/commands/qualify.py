"""`gammaray qualify`: check whether a draft is fit for a target, before anything is deployed.

Exit codes in addition to those of every command: 0 at least one candidate is FIT; 4 none is, but at least one
is FIT BUT SLOWER; 5 all are UNFIT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from gammaray.bench.provenance import write_result
from gammaray.bench.workloads import prompts
from gammaray.cli.options import read_prompts
from gammaray.cli.output import output_console
from gammaray.cli.values import FloatRange, IntRange, list_of, temperature
from gammaray.errors import InvalidArgumentError
from gammaray.qualify.judgement import Fitness, judge
from gammaray.qualify.measured import QualifyTask, check_gamma
from gammaray.qualify.process import measure_pairs
from gammaray.qualify.tables import print_pair, print_ranking

EXIT_CODES = {Fitness.FIT: 0, Fitness.SLOWER: 4, Fitness.UNFIT: 5}


@click.command()
@click.option(
    "--target",
    required=True,
    help="Directory, hub name or GGUF file of the target; 'demo' is the demo pair's.",
)
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    help="Directory, hub name or GGUF file of a draft on a draft worker; repeatable.",
)
@click.option(
    "--head",
    "heads",
    multiple=True,
    help="Directory or hub name of what drafts in the target worker: an EAGLE-3 head, "
    "or a draft model of the same vocabulary; repeatable.",
)
@click.option(
    "--prompts",
    "prompt_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Prompts of the expected traffic: one per line, or a JSON list of strings.",
)
@click.option(
    "--num-prompts",
    type=IntRange(1, 100),
    default=6,
    show_default=True,
    help="Without --prompts: number of pieces of Python code and prose.",
)
@click.option("--chat", is_flag=True, help="Each prompt is a user's message, in the target's chat template.")
@click.option(
    "--tokens",
    "max_tokens",
    type=IntRange(2),
    default=96,
    show_default=True,
    help="Maximum tokens per completion.",
)
@click.option(
    "--gammas",
    default="1,2,4,8",
    show_default=True,
    callback=list_of(lambda text: check_gamma(int(text)), "1 to 64"),
    help="Depths of chains; gamma 0 is always measured.",
)
@click.option(
    "--temperatures",
    default="0,1",
    show_default=True,
    callback=list_of(temperature, "numbers such as 0 or 0.7"),
)
@click.option(
    "--rtt-ms",
    type=FloatRange(0, 1e6),
    default=0.5,
    show_default=True,
    help="Network time that a proposal of a draft worker adds to a cycle.",
)
@click.option(
    "--min-speedup",
    type=FloatRange(0.01, 100),
    default=1.1,
    show_default=True,
    help="Speedup that a draft must reach.",
)
@click.option(
    "--error",
    type=FloatRange(0, 0.5),
    default=0.01,
    show_default=True,
    help="Measuring stops when the verdict is wrong with at most this probability; 0: never early.",
)
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="File for the result.")
@click.pass_context
def qualify(context: click.Context, /, out: Path | None, **given: Any) -> None:
    """Check whether drafts or heads suit a target: served exactly, lossless, and faster on this machine.

    Measuring a draft stops as soon as it is certain at each temperature whether it pays.

    Both models run alternately in one process; no cluster is needed.
    """
    task = _task(given)
    with _progress() as report:
        pairs = measure_pairs(task, report)
    judgements = [judge(pair, task) for pair in pairs]
    console = output_console()
    for pair, judgement in zip(pairs, judgements, strict=True):
        print_pair(console, pair, judgement)
    if len(pairs) > 1:
        print_ranking(console, pairs, judgements)
    if out is not None:
        candidates = [
            {"draft": pair.draft.name, **asdict(judgement), "measured": pair.model_dump()}
            for pair, judgement in zip(pairs, judgements, strict=True)
        ]
        result = {"settings": task.model_dump(), "candidates": candidates}
        click.echo(f"written: {write_result('qualify', result, out)}")
    context.exit(min(EXIT_CODES[judgement.fitness] for judgement in judgements))


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield what shows the current step on stderr: in place on a terminal, else as lines."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
    else:
        yield lambda text: click.echo(text, err=True)


def _task(given: dict[str, Any]) -> QualifyTask:
    if not given["drafts"] and not given["heads"]:
        raise click.UsageError("Missing option '--draft' or '--head'.")
    for role in ("target", "drafts", "heads"):
        if "" in ((given[role],) if role == "target" else given[role]):
            raise InvalidArgumentError(
                role.removesuffix("s"), "an empty name", "a directory, hub name or GGUF file"
            )
    path: Path | None = given.pop("prompt_file")
    count: int = given.pop("num_prompts")
    texts = prompts("mixed", count) if path is None else read_prompts(path, "--prompts")
    unique = {name: tuple(dict.fromkeys(given.pop(name))) for name in ("drafts", "heads")}
    gammas = tuple(sorted(given.pop("gammas")))
    return QualifyTask(**given, **unique, prompts=tuple(texts), gammas=gammas)
