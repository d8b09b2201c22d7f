"""`gammaray qualify`: check whether a draft is fit for a target, before anything is deployed.

Exit codes in addition to those of every command: 0 at least one candidate is FIT; 4 none is, but at least one
is FIT BUT SLOWER; 5 all are UNFIT.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gammaray.cli.options import read_prompts
from gammaray.cli.program import WORKER_PACKAGES, Program, become, check_packages
from gammaray.cli.settings import checked_settings, settings_options
from gammaray.qualify.measured import QualifyTask

RESULT_OPTION = click.Option(
    ["--json", "out"], type=click.Path(dir_okay=False, path_type=Path), help="File for the result."
)


@click.command(
    cls=Program,
    params=[*settings_options(QualifyTask, has_types=True), RESULT_OPTION],
    help=QualifyTask.__doc__,
)
def qualify(**options: Any) -> None:
    check_packages("qualify", WORKER_PACKAGES, "worker")
    task = checked_settings(QualifyTask, options)
    if task.prompts:
        read_prompts(Path(task.prompts), "--prompts")
    become("services.qualify")
