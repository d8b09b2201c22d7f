"""`gammaray qualify`: check whether drafts suit a target, before anything is deployed.

Exit codes in addition to those of every command: 0 at least one candidate is FIT; 4 none is, but at least one
is FIT BUT SLOWER; 5 all are UNFIT.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from gammaray.bench.prompts import own_prompts
from gammaray.bench.provenance import write_result
from gammaray.bench.run import BenchSettings, run_bench
from gammaray.bench.tables import show_point
from gammaray.cli.local_cluster import START_TIMEOUT_S, NotServedError, local_cluster
from gammaray.cli.program import CLUSTER_PACKAGES, check_packages
from gammaray.client.async_client import AsyncClient
from gammaray.program.output import columns, output_console
from gammaray.program.prompts import read_prompts
from gammaray.program.settings import checked_settings, settings_options
from gammaray.program.values import NEW_FILE
from gammaray.qualify.judgement import Fitness, Judgement, judge
from gammaray.qualify.task import QualifyTask

EXIT_CODES = {Fitness.FIT: 0, Fitness.SLOWER: 4, Fitness.UNFIT: 5}
_COLOURS = {Fitness.FIT: "green", Fitness.SLOWER: "yellow", Fitness.UNFIT: "red"}
_INEXACT = ("none", "vLLM")
"""How `kernel` begins for what rounds a row otherwise in another batch."""

_RESULT = click.Option(["--json", "out"], type=NEW_FILE, help="File for the result.")


@click.command(params=[*settings_options(QualifyTask, has_types=True), _RESULT], help=QualifyTask.__doc__)
def qualify(**options: Any) -> None:
    check_packages("qualify", CLUSTER_PACKAGES, "all")
    task = checked_settings(QualifyTask, options)
    prompts = own_prompts(task.num_prompts)
    if task.prompts:
        prompts = [("given", text) for text in read_prompts(Path(task.prompts), "--prompts")]
    candidates = [("draft", name) for name in task.draft] + [("head", name) for name in task.head]
    console, found = output_console(), []
    for role, name in candidates:
        click.echo(f"starting {task.target} with the {role} {name}", err=True)
        judgement, result = asyncio.run(_qualified(task, role, name, prompts, console))
        found.append((f"{role} {name}", judgement, result))
        _show(console, found[-1][0], judgement)
    if len(found) > 1:
        _rank(console, [(name, judgement) for name, judgement, _ in found])
    if options["out"] is not None:
        listed = [{"candidate": name, **asdict(judged), "measured": result} for name, judged, result in found]
        result = {"settings": task.model_dump(mode="json"), "candidates": listed}
        click.echo(f"written: {write_result('qualify', result, options['out'])}")
    click.get_current_context().exit(min(EXIT_CODES[judgement.fitness] for _, judgement, _ in found))


async def _qualified(
    task: QualifyTask, role: str, name: str, prompts: Sequence[tuple[str, str]], console: Console
) -> tuple[Judgement, dict[str, Any]]:
    gammas = tuple(map(str, task.gammas))
    settings = BenchSettings(
        "given" if task.prompts else "own", task.tokens, task.repeats, gammas, task.temperatures
    )
    try:
        async with AsyncExitStack() as stack:
            place = await stack.enter_async_context(local_cluster("--target", task.target, f"--{role}", name))
            client = await stack.enter_async_context(AsyncClient(place.grpc, timeout_s=START_TIMEOUT_S))
            kernels = [own.kernel for own in await client.status() if own.role == "target"]
            result = await run_bench(
                client, settings, prompts, lambda: None, lambda point: show_point(console, point)
            )
    except NotServedError as error:
        return Judgement(Fitness.UNFIT, (str(error),)), {}
    is_exact = not any(kernel.startswith(_INEXACT) for kernel in kernels)
    return judge(result, task.min_speedup, is_exact=is_exact), result


def _show(console: Console, name: str, judgement: Judgement) -> None:
    for warning in judgement.warnings:
        console.print(f"note: {warning}", soft_wrap=True, markup=False)
    console.print(f"[bold {_COLOURS[judgement.fitness]}]{judgement.fitness.value}[/]: {name}", soft_wrap=True)
    for reason in judgement.reasons:
        console.print(f"  {reason}", soft_wrap=True, markup=False)
    console.print()


def _rank(console: Console, found: Sequence[tuple[str, Judgement]]) -> None:
    table, order = columns("candidate", "verdict", "best speedup"), list(Fitness)
    for name, judged in sorted(found, key=lambda one: (order.index(one[1].fitness), -one[1].best_speedup)):
        table.add_row(
            name, judged.fitness.value, f"{judged.best_speedup:.2f}x" if judged.best_speedup else ""
        )
    console.print(table)
