"""The launcher's command line and what it prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gammaray.config import ClusterSettings
from gammaray.program.settings import parse_settings
from gammaray.program.shared_options import START_OPTIONS


@dataclass(frozen=True)
class LauncherOptions:
    """Options of the launcher's command line, see `gammaray.cli.commands.up`."""

    cluster: ClusterSettings
    wait_ready: bool
    die_with_parent: bool
    start_timeout_s: float


def parse_options(argv: Sequence[str] | None = None) -> LauncherOptions:
    """Return the options of a command line; missing ones come from the environment, else the defaults."""
    arguments = sys.argv[1:] if argv is None else argv
    prog = "python -m orchestrator.launcher.cluster"
    cluster, others = parse_settings(ClusterSettings, prog, arguments, START_OPTIONS)
    return LauncherOptions(cluster, **others)


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
    return partial(print, text, file=output, flush=True)
