"""Command-line options of a worker, made from its settings class: no default is written twice."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn, TypeVar

from pydantic import ValidationError

from gammaray.config import WorkerSettings, flag_names, settings_error
from gammaray.errors import InvalidArgumentError

__all__ = ["EXIT_BAD_SETTINGS", "EXIT_UNSUPPORTED_MODEL", "parse_settings"]

EXIT_BAD_SETTINGS = 2
EXIT_UNSUPPORTED_MODEL = 3

SettingsT = TypeVar("SettingsT", bound=WorkerSettings)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_SETTINGS, f"{self.prog}: {message}\n")


def parse_settings(
    settings_class: type[SettingsT], prog: str, argv: Sequence[str] | None = None
) -> SettingsT:
    """Return the settings of a command line; what it leaves out comes from the environment or the defaults.

    Ends the process with status 2 and one line when a setting is bad.
    """
    parser = _Parser(prog=f"python -m {prog}", description=settings_class.__doc__)
    for name, info in settings_class.model_fields.items():
        option = f"--{name.replace('_', '-')}"
        text = f"{info.description} Default: {info.default!r}.".replace("%", "%%")
        if info.annotation is bool:
            on, off = flag_names(name)
            parser.add_argument(on, action="store_true", dest=name, default=argparse.SUPPRESS, help=text)
            parser.add_argument(
                off, action="store_false", dest=name, default=argparse.SUPPRESS, help=f"Opposite of {on}."
            )
        else:
            parser.add_argument(option, default=argparse.SUPPRESS, help=text, metavar=name.upper())
    given = vars(parser.parse_args(argv))
    try:
        return settings_class(**given)
    except ValidationError as error:
        parser.error(str(settings_error(error)))
    except InvalidArgumentError as error:  # a variable of the environment that is no setting
        parser.error(str(error))
