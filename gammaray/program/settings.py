"""Command-line options made from a class: of workers, of `gammaray up` and its launcher, of `gammaray train`.

Omitted options of settings come from the environment variables GAMMARAY_<OPTION>, then from the defaults.

NOTE: pydantic-settings can make a command line, too, but only with argparse: `gammaray up` could not be a
command of `gammaray` then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gammaray.config import REPEATABLE, settings_error
from gammaray.errors import InvalidArgumentError
from gammaray.program.values import IntRange

SettingsT = TypeVar("SettingsT", bound=BaseModel)


def settings_options(settings: type[BaseModel], *, has_types: bool) -> list[click.Option]:
    """Return one option per field, those of the class itself before inherited ones; None if omitted.

    Click checks numbers and choices, and shows them, if `has_types`; else only the settings class does.
    """
    fields = sorted(settings.model_fields.items(), key=lambda field: field[0] not in settings.__annotations__)
    return [_option(name, info, has_types) for name, info in fields]


def parse_settings(
    settings: type[SettingsT], prog: str, argv: Sequence[str] | None, others: Sequence[click.Parameter] = ()
) -> tuple[SettingsT, dict[str, Any]]:
    """Return the settings of a command line (None: the process's), and the values of its `others`."""
    command = click.Command(
        prog, params=[*settings_options(settings, has_types=False), *others], help=settings.__doc__
    )
    try:
        given = command.make_context(prog, list(sys.argv[1:] if argv is None else argv)).params
    except click.exceptions.Exit as end:
        raise SystemExit(end.exit_code) from None
    except click.NoSuchOption as error:
        raise InvalidArgumentError(error.option_name, "an unknown option", "the options of --help") from None
    except click.UsageError as error:
        message = error.format_message().rstrip(".")
        raise InvalidArgumentError("command line", message, "the values of --help") from None
    values = {option.name: given[option.name] for option in others if option.name}
    return checked_settings(settings, given), values


def checked_settings(settings: type[SettingsT], given: dict[str, Any]) -> SettingsT:
    """Return settings from the values of options, others ignored; InvalidArgumentError names a wrong one."""
    values: dict[str, Any] = {
        name: given[name] for name in settings.model_fields if given.get(name) not in (None, ())
    }
    for name, value in values.items():
        if isinstance(value, tuple) and settings.model_fields[name].annotation is str:
            values[name] = ",".join(value)
    try:
        return settings(**values)
    except ValidationError as error:
        raise settings_error(error) from None


def _option(name: str, info: FieldInfo, has_types: bool) -> click.Option:
    is_flag, option = info.annotation is bool, name.replace("_", "-")
    return click.Option(
        [f"--{option}/--no-{option}" if is_flag else f"--{option}", name],
        type=None if is_flag else _type(info) if has_types else click.STRING,
        default=None,
        multiple=info.json_schema_extra == REPEATABLE,
        help=f"{info.description}  [{_shown(info)}]",
    )


def _shown(info: FieldInfo) -> str:
    return (
        "required"
        if info.is_required()
        else f"default: {'empty' if info.default in ('', ()) else info.default}"
    )


def _type(info: FieldInfo) -> Any:
    if get_origin(info.annotation) is Literal:
        return click.Choice(get_args(info.annotation))
    if info.annotation is int:
        bounds = {name: getattr(m, name) for m in info.metadata for name in ("ge", "le") if hasattr(m, name)}
        return IntRange(bounds.get("ge"), bounds.get("le"))
    return click.FLOAT if info.annotation is float else click.STRING
