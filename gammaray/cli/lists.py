"""Options whose value is a comma-separated list."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from gammaray.errors import InvalidArgumentError

__all__ = ["list_of"]

_Value = TypeVar("_Value")


def list_of(
    parse: Callable[[str], _Value], allowed: str
) -> Callable[[click.Context, click.Parameter, str], tuple[_Value, ...]]:
    """Return the callback of an option whose value is a comma-separated list; doubles are dropped.

    Args:
        parse: Turns one part into its value; its ValueError or InvalidArgumentError refuses the option.
        allowed: What the parts may be, for the message.
    """

    def callback(context: click.Context, parameter: click.Parameter, value: str) -> tuple[_Value, ...]:
        parts = [part.strip() for part in value.split(",")]
        try:
            return tuple(dict.fromkeys(parse(part) for part in parts))
        except (ValueError, InvalidArgumentError):
            message = f"got {value!r}, allowed: {allowed}, separated by commas"
            raise click.BadParameter(message, context, parameter) from None

    return callback
