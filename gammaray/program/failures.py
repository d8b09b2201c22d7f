"""Exit status and message of an error, for `gammaray` and the programs that its commands become."""

from __future__ import annotations

import click


def shown(message: str) -> str:
    """Return an error's message, which may quote another program, without control characters."""
    from gammaray.errors import escaped

    return "\n".join(map(escaped, message.split("\n")))


def failure_of(error: Exception) -> tuple[int, str] | None:
    """Return exit status and message of an error; None for errors that are not gammaray's."""
    if isinstance(error, (click.ClickException, click.exceptions.Exit, click.Abort)):
        return None
    from gammaray.errors import GammarayError, InvalidArgumentError, UnavailableError

    if isinstance(error, UnavailableError):
        return 3, f"{error} (is a cluster running there? `gammaray up` starts one)"
    if isinstance(error, InvalidArgumentError):
        return 2, str(error)
    return (1, str(error)) if isinstance(error, GammarayError) else None
