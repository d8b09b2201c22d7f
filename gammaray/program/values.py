"""Types of option values: files, numbers within bounds, and comma-separated lists."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gammaray.checks import check_number
from gammaray.errors import InvalidArgumentError

GIVEN_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
"""A file that is read."""

NEW_FILE = click.Path(dir_okay=False, path_type=Path)
"""A file that is written."""

_Value = TypeVar("_Value")


class IntRange(click.IntRange):
    """An integer within bounds. Messages call it "integer"; click's own type says "integer range"."""

    name = "integer"


class FloatRange(click.FloatRange):
    """A finite number within bounds."""

    name = "number"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        number = super().convert(value, parameter, context)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", parameter, context)
        return number


def temperature(text: str) -> float:
    value = float(text)
    check_number("temperature", value, 0, 100)
    return value


def list_of(
    parse: Callable[[str], _Value], allowed: str
) -> Callable[[click.Context, click.Parameter, str], tuple[_Value, ...]]:
    """Return an option callback that parses a comma-separated list of `allowed` parts, each of them once.

    `parse` parses one part; its ValueError or InvalidArgumentError rejects the option.
    """

    def callback(context: click.Context, parameter: click.Parameter, value: str) -> tuple[_Value, ...]:
        parts = [part.strip() for part in value.split(",")]
        try:
            return tuple(dict.fromkeys(parse(part) for part in parts))
        except (ValueError, InvalidArgumentError):
            message = f"got {value!r}, allowed: {allowed}, separated by commas"
            raise click.BadParameter(message, context, parameter) from None

    return callback
