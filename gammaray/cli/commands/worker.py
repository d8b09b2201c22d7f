"""`gammaray worker`: start one worker of a cluster on several machines."""

from __future__ import annotations

from typing import Any

import click

from gammaray.cli.program import WORKER_PACKAGES, Program, become, check_packages
from gammaray.config import DraftSettings, TargetSettings
from gammaray.program.settings import settings_options


@click.group()
def worker() -> None:
    """Start one worker of a cluster on several machines; it announces itself in Redis.

    Omitted options come from the environment variables GAMMARAY_<OPTION>, then from the defaults.
    """


@worker.command(cls=Program, params=settings_options(TargetSettings, has_types=True))
def target(**options: Any) -> None:
    """Start a target worker, which verifies proposals; Ctrl-C or SIGTERM drains and ends it."""
    check_packages("a worker", WORKER_PACKAGES, "worker")
    become("services.target_worker")


@worker.command(cls=Program, params=settings_options(DraftSettings, has_types=True))
def draft(**options: Any) -> None:
    """Start a draft worker, which proposes tokens; Ctrl-C or SIGTERM drains and ends it."""
    check_packages("a worker", WORKER_PACKAGES, "worker")
    become("services.draft_worker")
