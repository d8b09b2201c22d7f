"""Commands whose work another program does, so that `gammaray` itself imports neither torch nor Ray.

After the checks of a command, `python -m MODULE` replaces this process (exec). It gets the same command line,
which it reads by the same options, receives the signals and sets the exit status.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import NoReturn

import click

from gammaray.errors import FailedPreconditionError

_ARGUMENTS = "gammaray.arguments"

WORKER_PACKAGES = ("services", "torch", "transformers")
CLUSTER_PACKAGES = ("fastapi", "grpc_health", "ray", "redis", "torch", "transformers")
"""One module of each dependency group that a cluster on one machine needs."""


class Program(click.Command):
    """A command that keeps its arguments as they were given."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        context.meta[_ARGUMENTS] = list(args)
        return super().parse_args(context, args)


def check_packages(what: str, names: Iterable[str], extra: str) -> None:
    """Raise FailedPreconditionError if `what` needs packages, one module of each, that are not installed."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise FailedPreconditionError(
            f"{what} needs packages that are not installed ({', '.join(missing)}): "
            f"pip install 'gammaray[{extra}]'"
        )


def become(module: str) -> NoReturn:
    """Replace this process by `python -m module` with the arguments of the current `Program`."""
    arguments = click.get_current_context().meta[_ARGUMENTS]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
