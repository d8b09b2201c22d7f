"""`gammaray qualify`: check whether a draft is fit for a target, before anything is deployed.

Exit codes in addition to those of every command: 0 at least one candidate is FIT; 4 none is, but at least one
is FIT BUT SLOWER; 5 all are UNFIT.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gammaray.bench.prompts import NUM_PROMPTS, own_prompts
from gammaray.cli.options import read_prompts
from gammaray.cli.program import WORKER_PACKAGES, Program, become, check_packages
from gammaray.cli.values import FloatRange, IntRange, list_of, temperature
from gammaray.errors import InvalidArgumentError
from gammaray.qualify.measured import QualifyTask
from gammaray.types import MAX_GAMMA


def _gamma(text: str) -> int:
    if not 1 <= int(text) <= MAX_GAMMA:
        raise ValueError
    return int(text)


@click.command(cls=Program)
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
    type=IntRange(1, NUM_PROMPTS),
    default=6,
    show_default=True,
    help="Without --prompts: number of own ones, code, prose and repetitive text in turn.",
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
    callback=list_of(_gamma, f"1 to {MAX_GAMMA}"),
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
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="File for the result.")
def qualify(**given: Any) -> None:
    """Check whether drafts or heads suit a target: served exactly, lossless, and faster on this machine.

    Both models run alternately in one process; no cluster is needed.
    """
    check_packages("qualify", WORKER_PACKAGES, "worker")
    task_of(**given)
    become("services.qualify")


def task_of(
    prompt_file: Path | None, num_prompts: int, out: Path | None, **given: Any
) -> tuple[QualifyTask, Path | None]:
    """Return the task that the values of the options are, and the file for its result.

    Raises:
        click.UsageError: There is no candidate, or the file of prompts has none.
        InvalidArgumentError: A name is empty.
    """
    if not given["drafts"] and not given["heads"]:
        raise click.UsageError("Missing option '--draft' or '--head'.")
    for role in ("target", "drafts", "heads"):
        if "" in ((given[role],) if role == "target" else given[role]):
            raise InvalidArgumentError(
                role.removesuffix("s"), "an empty name", "a directory, hub name or GGUF file"
            )
    if prompt_file is None:
        texts = [text for _, text in own_prompts(num_prompts)]
    else:
        texts = read_prompts(prompt_file, "--prompts")
    for name in ("drafts", "heads"):
        given[name] = tuple(dict.fromkeys(given[name]))
    return QualifyTask(**given | {"prompts": tuple(texts), "gammas": tuple(sorted(given["gammas"]))}), out
