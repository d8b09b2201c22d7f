"""`python -m services.train.live`: the process that a worker starts to train versions of its drafter.

It runs at idle priority, so that serving has the processors first, and ends with the worker.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from gammaray.errors import GammarayError, InvalidArgumentError
from gammaray.program.failures import failure_of
from gammaray.program.files import try_lock
from gammaray.program.parents import end_with_parent

_PERIOD_S = 2.0
_FAILED_WAIT_S = 60.0
"""After a round that could not write."""

_log = logging.getLogger(__name__)


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), required=True)
@click.option("--target", required=True)
@click.option("--drafter", required=True)
@click.option("--parent", type=int, required=True, help="Process id of the worker.")
def _learn(folder: Path, target: str, drafter: str, parent: int) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s learning: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as SIGTERM: it may end at any moment, also in a long step
    end_with_parent(signal.SIGKILL)
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.nice(19)
    os.umask(0o077)
    if os.getppid() != parent:
        return
    train_until(lambda: os.getppid() != parent, time.sleep, folder, target, drafter)


def train_until(
    stopped: Callable[[], bool], wait: Callable[[float], object], folder: Path, target: str, drafter: str
) -> None:
    """Train the drafters of a folder, unless another process does."""
    # Imported late: at idle priority it may take minutes, in which the worker may end.
    import torch

    from gammaray.learning.folder import LearningFolder
    from gammaray.learning.private import make_folder, open_file
    from services.train.live.trainer import Trainer

    torch.set_num_threads(1)
    with open_file(make_folder(folder) / "trainer.lock") as lock:
        if not try_lock(lock):
            return  # another worker's process trains for all of this machine
        try:
            trainer = Trainer(LearningFolder(folder), target, drafter, stopped)
        except GammarayError as error:
            raise InvalidArgumentError("learn", drafter, f"one that can be trained ({error})") from error
        while not stopped():
            try:
                version = trainer.run_round()
            except Exception as error:  # the disk is full, say
                _log.error("a version is not published: %s: %s", type(error).__name__, error)
                wait(_FAILED_WAIT_S)
                continue
            if version is None:
                wait(_PERIOD_S)


if __name__ == "__main__":
    try:
        _learn.main(standalone_mode=False)
    except Exception as error:
        if (failure := failure_of(error)) is None:
            raise
        click.echo(f"gammaray: {failure[1]}", err=True)
        sys.exit(failure[0])
