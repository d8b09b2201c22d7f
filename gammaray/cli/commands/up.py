"""`gammaray up`: start a whole cluster on this machine.

The options are those of `ClusterSettings`. This process is replaced (exec) by
`python -m orchestrator.launcher.cluster`, which therefore receives the signals and sets the exit code.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any, Literal, get_args, get_origin

import click
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from gammaray.cli.values import FloatRange, IntRange
from gammaray.config import ClusterSettings, flag_names, settings_error
from gammaray.deploy.gpus import check_device

__all__ = ["up"]

_NEEDED = ("fastapi", "grpc_health", "ray", "redis", "torch", "transformers")
"""One module of each dependency group that a cluster on one machine needs."""


@click.command()
@click.option("--wait-ready", is_flag=True, help="Print `ready http=... grpc=...` once the cluster is ready.")
@click.option("--die-with-parent", is_flag=True, help="Stop when the process that started this one ends.")
@click.option(
    "--start-timeout-s",
    type=FloatRange(0, min_open=True),
    help="Fail if the cluster is not ready after this time.",
)
def up(**options: Any) -> None:
    """Start a whole cluster on this machine: Redis, workers, orchestrator, proxies; Ctrl-C stops all.

    Omitted options come from the environment variables GAMMARAY_<OPTION>, then from the defaults.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        click.echo(
            f"gammaray: a cluster needs packages that are not installed ({', '.join(missing)}): "
            "pip install 'gammaray[all]'",
            err=True,
        )
        click.get_current_context().exit(1)
    _check(options)
    command = [sys.executable, "-m", "orchestrator.launcher.cluster", *launcher_arguments(options)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)


def _check(options: dict[str, Any]) -> None:
    """Check what can be checked without models or ports, before the launcher replaces this process.

    Raises:
        InvalidArgumentError: A setting is out of bounds, two exclude each other, or there is no GPU.
    """
    given = {
        name: value
        for name, value in options.items()
        if name in ClusterSettings.model_fields and value is not None
    }
    try:
        settings = ClusterSettings(**given)
    except ValidationError as error:
        raise settings_error(error) from None
    check_device(settings.device)


def launcher_arguments(options: dict[str, Any]) -> list[str]:
    """Return the command line of the options that were given."""
    arguments = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if value is True:
            arguments.append(f"--{option}")
        elif value is False and name in ClusterSettings.model_fields:
            arguments.append(flag_names(name)[1])
        elif value is not None and value is not False:
            arguments.append(f"--{option}={value}")
    return arguments


def _option(name: str, info: FieldInfo) -> click.Option:
    option = f"--{name.replace('_', '-')}"
    flag = info.annotation is bool
    return click.Option(
        ["/".join(flag_names(name)) if flag else option, name],
        type=None if flag else _type(info),
        default=None,
        help=f"{info.description}  [default: {info.default if info.default != '' else 'empty'}]",
    )


def _type(info: FieldInfo) -> Any:
    if get_origin(info.annotation) is Literal:
        return click.Choice(get_args(info.annotation))
    if info.annotation is int:
        bounds = {name: getattr(m, name) for m in info.metadata for name in ("ge", "le") if hasattr(m, name)}
        return IntRange(bounds.get("ge"), bounds.get("le"))
    return click.STRING


up.params.extend(_option(name, info) for name, info in ClusterSettings.model_fields.items())
