"""The options of every command that talks to a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["connection_options"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def connection_options(timeout_s: float) -> Callable[[_Function], _Function]:
    """Add `--address`, `--api-key` and `--timeout`, whose default is `timeout_s`."""
    options = (
        click.option(
            "--address",
            "-a",
            default="127.0.0.1:9000",
            envvar="GAMMARAY_ADDRESS",
            show_default=True,
            show_envvar=True,
            metavar="HOST:PORT",
            help="The cluster's gRPC API.",
        ),
        click.option(
            "--api-key",
            envvar="GAMMARAY_API_KEY",
            show_envvar=True,
            metavar="KEY",
            help="Key of a cluster that asks for one.",
        ),
        click.option(
            "--timeout",
            "timeout_s",
            type=float,
            default=timeout_s,
            show_default=True,
            metavar="SECONDS",
            help="Give up after this long.",
        ),
    )

    def decorate(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate
