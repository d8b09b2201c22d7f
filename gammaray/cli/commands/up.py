"""`gammaray up`: start a whole cluster on this machine.

The options are `START_OPTIONS` and those of `ClusterSettings`. `orchestrator.launcher.cluster` does the rest.
"""

from __future__ import annotations

from typing import Any

import click

from gammaray.cli.program import CLUSTER_PACKAGES, Program, become, check_packages
from gammaray.cli.settings import checked_settings, settings_options
from gammaray.cli.values import FloatRange
from gammaray.config import ClusterSettings
from gammaray.engines import check_installed

START_OPTIONS = (
    click.Option(
        ["--wait-ready"], is_flag=True, help="Print `ready http=... grpc=...` once the cluster is ready."
    ),
    click.Option(
        ["--die-with-parent"], is_flag=True, help="Stop when the process that started this one ends."
    ),
    click.Option(
        ["--start-timeout-s"],
        type=FloatRange(0, 86_400, min_open=True),
        default=300.0,
        help="Fail if the cluster is not ready after this time.",
    ),
)
"""Options of a start, which are no settings of the cluster."""


@click.command(cls=Program, params=[*START_OPTIONS, *settings_options(ClusterSettings, has_types=True)])
def up(**options: Any) -> None:
    """Start a whole cluster on this machine: Redis, workers, orchestrator, proxies; Ctrl-C stops all.

    Omitted options come from the environment variables GAMMARAY_<OPTION>, then from the defaults.
    """
    check_packages("a cluster", CLUSTER_PACKAGES, "all")
    # What can be checked without models or ports is checked before the launcher replaces this process.
    settings = checked_settings(ClusterSettings, options)
    check_installed(settings.engine, settings.device)
    become("orchestrator.launcher.cluster")
