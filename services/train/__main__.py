"""`python -m services.train`: `gammaray train`, with its options.

SIGINT and SIGTERM save the state and stop.
"""

from __future__ import annotations

import signal
import sys
import threading

import click

from gammaray.program.settings import parse_settings
from gammaray.qualify.training import TrainTask
from services.process.program import run_program
from services.train.run import run


def _train() -> int:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    task, _ = parse_settings(TrainTask, "gammaray train", sys.argv[1:])
    if run(task, click.echo, stop.is_set):
        return 0
    click.echo("stopped; the same command continues")
    return 130


if __name__ == "__main__":
    sys.exit(run_program(_train))
