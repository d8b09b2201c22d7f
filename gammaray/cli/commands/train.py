"""`gammaray train`: a drafter for a target, trained on text that the target writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gammaray.cli.options import read_prompts
from gammaray.cli.program import WORKER_PACKAGES, Program, become, check_packages
from gammaray.cli.settings import checked_settings, settings_options
from gammaray.deploy.gpus import check_device
from gammaray.qualify.training import TrainTask


@click.command(cls=Program, params=settings_options(TrainTask, has_types=True), help=TrainTask.__doc__)
def train(**options: Any) -> None:
    check_packages("training", WORKER_PACKAGES, "worker")
    task = checked_settings(TrainTask, options)
    check_device(task.device)
    if task.prompts:
        read_prompts(Path(task.prompts), "--prompts")
    become("services.train")
