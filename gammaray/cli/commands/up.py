"""`gammaray up`: start a whole cluster on this machine.

The options are `START_OPTIONS` and those of `ClusterSettings`. `orchestrator.launcher.cluster` does the rest.
"""

from __future__ import annotations

from typing import Any

import click

from gammaray.cli.program import CLUSTER_PACKAGES, Program, become, check_packages
from gammaray.config import ClusterSettings
from gammaray.engines import check_installed
from gammaray.program.settings import checked_settings, settings_options
from gammaray.program.shared_options import START_OPTIONS


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
