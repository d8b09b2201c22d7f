"""The `gammaray` command.

Exit codes: 0 fine, 1 something failed, 2 a wrong argument, 3 nobody answers, 130 interrupted; `qualify` has
two more for its verdicts.
"""

from __future__ import annotations

from importlib import import_module

import click

from gammaray import __version__

__all__ = ["main"]

_COMMANDS = (
    "bench",
    "certs",
    "chat",
    "config",
    "generate",
    "keys",
    "qualify",
    "sessions",
    "size",
    "status",
    "top",
    "trace",
    "up",
)


class _Gammaray(click.Group):
    """Imports a command when it is named, and ends every failure with one line and its exit code."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"gammaray.cli.{name}"), name)
        return command

    def invoke(self, context: click.Context) -> None:
        from gammaray.errors import GammarayError, InvalidArgumentError, UnavailableError

        try:
            super().invoke(context)
        except UnavailableError as error:
            _fail(context, 3, f"{error} (is a cluster running there? `gammaray up` starts one)")
        except InvalidArgumentError as error:
            _fail(context, 2, str(error))
        except GammarayError as error:
            _fail(context, 1, str(error))
        except KeyboardInterrupt:
            click.echo(err=True)
            context.exit(130)


@click.group(cls=_Gammaray, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gammaray")
def main() -> None:
    """Lossless speculative decoding as a cluster."""


def _fail(context: click.Context, code: int, message: str) -> None:
    click.echo(f"gammaray: {message}", err=True)
    context.exit(code)
