"""`gammaray up`: start a whole cluster on this machine.

The options are those of `ClusterSettings`. This process is replaced (exec) by
`python -m orchestrator.launcher.cluster` with the same command line. The launcher therefore receives the
signals and sets the exit code.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

import click

from gammaray.cli.settings import checked_settings, settings_options
from gammaray.cli.values import FloatRange
from gammaray.config import ClusterSettings
from gammaray.deploy.engines import check_engine
from gammaray.deploy.gpus import check_device

_NEEDED = ("fastapi", "grpc_health", "ray", "redis", "torch", "transformers")
"""One module of each dependency group that a cluster on one machine needs."""

_ARGUMENTS = "gammaray.up.arguments"

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


class _Up(click.Command):
    """Command that keeps its arguments as they were given."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        context.meta[_ARGUMENTS] = list(args)
        return super().parse_args(context, args)


@click.command(cls=_Up, params=[*START_OPTIONS, *settings_options(ClusterSettings, has_types=True)])
@click.pass_context
def up(context: click.Context, /, **options: Any) -> None:
    """Start a whole cluster on this machine: Redis, workers, orchestrator, proxies; Ctrl-C stops all.

    Omitted options come from the environment variables GAMMARAY_<OPTION>, then from the defaults.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        click.echo(
            f"gammaray: a cluster needs packages that are not installed ({', '.join(missing)}): "
            "pip install 'gammaray[all]'",
            err=True,
        )
        context.exit(1)
    # What can be checked without models or ports is checked before the launcher replaces this process.
    settings = checked_settings(ClusterSettings, options)
    check_device(settings.device)
    check_engine(settings.engine, settings.device)
    command = [sys.executable, "-m", "orchestrator.launcher.cluster", *context.meta[_ARGUMENTS]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)
