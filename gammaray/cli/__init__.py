"""The `gammaray` command.

Exit status: 0 success, 1 failure, 2 invalid argument, setting or environment variable, 3 the server does not
answer or TLS with it fails, 130 interrupted; `qualify` has two more for its verdicts.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from importlib import import_module

import click

from gammaray import __version__
from gammaray.environment import check_environment, past_proxies
from gammaray.program.failures import failure_of, shown

# Each command and its short help, so that `gammaray --help` imports no command.
_COMMANDS = {
    "audit": "Check from outside whether a server's text follows its model.",
    "bench": "Measure a running cluster: speed, acceptance and latency by gamma.",
    "chat": "Chat with the model.",
    "check": "Check receipts of completions against the target.",
    "drafters": "List, pin and roll back the drafters that a machine learns.",
    "generate": "Stream a completion of PROMPT.",
    "keys": "Create, list and revoke API keys; keys for receipts.",
    "qualify": "Check whether drafts or heads suit a target.",
    "sessions": "List, resume, cancel and delete sessions.",
    "status": "List the processes of a cluster.",
    "top": "Show live statistics of a cluster.",
    "trace": "Show the tokens and times of each cycle of a SESSION.",
    "train": "Train a drafter for a target on text that the target writes.",
    "up": "Start a whole cluster on this machine.",
    "worker": "Start one worker of a cluster on several machines.",
}


class _Gammaray(click.Group):
    """Command group that imports commands on use, and reports failures as one line and an exit status."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        if name not in ("up", "worker"):
            # Errors have what gRPC logs on failed handshakes; set before gRPC is imported.
            os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
            os.environ.update(past_proxies(os.environ, "localhost", "127.0.0.1", "::1"))
        module = {"status": "top", "drafters": "train"}.get(name, name)
        command: click.Command = getattr(import_module(f"gammaray.cli.commands.{module}"), name)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def invoke(self, context: click.Context) -> None:
        try:
            if not {"-h", "--help"}.intersection(context.args):
                check_environment(_known_variables)
            super().invoke(context)
        except KeyboardInterrupt:
            click.echo(err=True)
            context.exit(130)
        except Exception as error:
            if (failure := failure_of(error)) is None:
                raise
            code, message = failure
            click.echo(f"gammaray: {shown(message)}", err=True)
            context.exit(code)


def _known_variables() -> Collection[str]:
    from gammaray.config import known_variables  # imports pydantic, which most commands do not need

    return known_variables()


@click.group(cls=_Gammaray, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="gammaray")
def main() -> None:
    """Lossless speculative decoding as a cluster."""
