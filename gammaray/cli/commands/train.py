"""`gammaray train`: a drafter for a target, trained on text that the target writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gammaray.cli.options import read_prompts
from gammaray.cli.program import WORKER_PACKAGES, Program, become, check_packages
from gammaray.cli.values import FloatRange, IntRange, list_of
from gammaray.deploy.gpus import check_device
from gammaray.qualify.training import TrainTask


def _layers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    return () if value is None else list_of(int, "numbers of layers")(context, parameter, value)


@click.command(cls=Program)
@click.option("--target", required=True, help="Directory or hub name; 'demo' is the demo pair's.")
@click.option("--out", required=True, type=click.Path(file_okay=False), help="Directory of the drafter.")
@click.option("--work", type=click.Path(file_okay=False), help="Answers and state.  [default: OUT.work]")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="One per line, or a JSON list of strings; default: the target writes its own.",
)
@click.option("--chat/--text", default=True, help="Prompts are user turns, or texts to continue.")
@click.option(
    "--kind",
    type=click.Choice(["eagle3", "plain"]),
    default="eagle3",
    show_default=True,
    help="A head, which reads the target's hidden states in its process, or a draft model.",
)
@click.option(
    "--layers",
    callback=_layers,
    help="Layers of the target, counted from 0, of which a head reads the states, or to start a draft model "
    "from; default: low, middle, high and last, or for plain 0,1.",
)
@click.option("--init", type=click.Path(exists=True, file_okay=False), help="A drafter to start from.")
@click.option(
    "--draft-vocab",
    type=IntRange(1),
    default=8192,
    show_default=True,
    help="Tokens it can propose.",
)
@click.option(
    "--tokens", type=IntRange(1), default=300_000, show_default=True, help="Answer tokens to generate."
)
@click.option("--max-tokens", type=IntRange(8), default=256, show_default=True, help="Longest answer.")
@click.option("--batch", type=IntRange(1), default=64, show_default=True, help="Answers generated at once.")
@click.option(
    "--train-tokens", type=IntRange(1), default=512, show_default=True, help="Least tokens per step."
)
@click.option("--learning-rate", type=FloatRange(1e-7, 1), help="Default: 0.001, for plain 0.002.")
@click.option("--loss", type=click.Choice(["kl", "tv", "coupled"]), default="kl", show_default=True)
@click.option(
    "--minutes",
    type=FloatRange(0.01, 1e5),
    default=60.0,
    show_default=True,
    help="Limit of all runs together.",
)
@click.option("--steps-per-report", type=IntRange(1), default=50, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--threads", type=IntRange(1, 256), default=2, show_default=True)
@click.option("--seed", type=IntRange(0), default=0, show_default=True)
def train(**given: Any) -> None:
    """Train a drafter for a target on text that the target writes.

    Interrupted, the same command continues.
    """
    check_packages("training", WORKER_PACKAGES, "worker")
    check_device(task_of(**given).device)
    become("services.train")


def task_of(prompts: Path | None, out: str, work: str | None, **given: Any) -> TrainTask:
    """Return the task that the values of the options are.

    Raises:
        click.BadParameter: The file of prompts has none.
    """
    texts = None if prompts is None else tuple(read_prompts(prompts, "--prompts"))
    return TrainTask(prompts=texts, out=out, work=work or f"{out.rstrip('/')}.work", **given)
