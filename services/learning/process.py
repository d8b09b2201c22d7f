"""Keeps the training process of a machine alive while a worker serves."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 60.0
"""Before a process that ended is started again; twice as long each time. One that finds another worker's
process at work ends at once, and is there when that one dies."""

CANNOT_TRAIN = 2
"""Exit status after which it is not started again: this target and drafter cannot be trained."""

_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
"""The memory of large tensors goes back to the system; glibc would keep it between the streams that stay:
200 of SmolLM2 with its head, of 156 MB, took 734 MiB, and take 163 MiB with this (by hand, 2026-11-27)."""

_log = logging.getLogger(__name__)


def trainer_command(folder: Path, target: str, drafter: str) -> list[str]:
    options = {"folder": folder, "target": target, "drafter": drafter, "parent": os.getpid()}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "services.train.live", *arguments]


class TrainingProcess:
    """Starts a command again whenever it ends, until `close`, or until it ends with `CANNOT_TRAIN`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._stop, self._starting = threading.Event(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="training process", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._starting:
            self._stop.set()
        if (process := self._process) is not None:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        wait_s = FIRST_WAIT_S
        while not self._stop.is_set():
            try:
                status = self._run_once()
            except OSError as error:  # no descriptor, process or memory is left
                _log.warning("training cannot start: %s; it is tried again in %g s", error, wait_s)
            else:
                if status == CANNOT_TRAIN:
                    _log.error("nothing is trained until this worker starts again: see the error above")
                    return
                if status and not self._stop.is_set():
                    _log.warning("training ended with status %d; it starts again in %g s", status, wait_s)
            self._stop.wait(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _run_once(self) -> int:
        with self._starting:
            if self._stop.is_set():
                return 0
            # PDEATHSIG is about the thread that starts the process: this one, which outlives it.
            environment = {**_MALLOC, **os.environ}
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, env=environment)
        return self._process.wait()
