"""The launcher's command line and what it prints."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from gammaray.checks import check_number
from gammaray.config import ClusterSettings, flag_names, settings_error

__all__ = ["LauncherOptions", "announcer", "parse_options"]

MAX_START_TIMEOUT_S = 86_400.0


@dataclass(frozen=True)
class LauncherOptions:
    """Options of the launcher's command line.

    Args:
        cluster: Settings of the cluster.
        wait_ready: Print one line for scripts instead of the endpoints for people.
        die_with_parent: Stop when the parent process ends.
        start_timeout_s: Deadline of the start, in seconds.
    """

    cluster: ClusterSettings
    wait_ready: bool
    die_with_parent: bool
    start_timeout_s: float


def parse_options(argv: Sequence[str] | None = None) -> LauncherOptions:
    """Return the options of a command line; missing ones come from the environment, else the defaults.

    Raises:
        InvalidArgumentError: A setting is out of bounds.
    """
    parser = argparse.ArgumentParser(prog="python -m orchestrator.launcher.cluster", description=__doc__)
    for name, info in ClusterSettings.model_fields.items():
        option, text = f"--{name.replace('_', '-')}", f"{info.description} Default: {info.default!r}."
        if info.annotation is bool:
            on, off = flag_names(name)
            for flag, action in ((on, "store_true"), (off, "store_false")):
                parser.add_argument(flag, action=action, dest=name, default=argparse.SUPPRESS, help=text)
        else:
            parser.add_argument(option, default=argparse.SUPPRESS, help=text)
    parser.add_argument(
        "--wait-ready", action="store_true", help="Print `ready http=... grpc=...` once the cluster is ready."
    )
    parser.add_argument("--die-with-parent", action="store_true", help="Stop when the parent process ends.")
    parser.add_argument(
        "--start-timeout-s", type=float, default=300.0, help="Timeout of the start, in seconds."
    )
    flags = vars(parser.parse_args(argv))
    own = {name: flags.pop(name) for name in ("wait_ready", "die_with_parent", "start_timeout_s")}
    check_number("start_timeout_s", own["start_timeout_s"], 0, MAX_START_TIMEOUT_S, open_low=True)
    try:
        return LauncherOptions(ClusterSettings(**flags), **own)
    except ValidationError as error:
        raise settings_error(error) from None


def announcer(options: LauncherOptions, host: str) -> Callable[[], None]:
    """Return a function that announces on standard output that the cluster serves.

    All other output of this process and its children to standard output is redirected to standard error, so
    that scripts read only the announcement.
    """
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    http = f"http://{host}:{options.cluster.http_port}"
    grpc = f"{host}:{options.cluster.grpc_port}"
    if options.wait_ready:
        text = f"ready http={http} grpc={grpc}"
    else:
        text = f"OpenAI-compatible HTTP: {http}/v1\ngRPC: {grpc}\nCtrl-C stops everything."

    def announce() -> None:
        print(text, file=output, flush=True)

    return announce
