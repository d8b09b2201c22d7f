"""The other ranks as child processes of rank 0: their start, their orders, their end.

Orders go through a pipe to each. A rank whose pipe is closed ends, so none outlives rank 0, however that
ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from services.engine.errors import EngineLostError
from services.engine.parallel_group import RankSpec

__all__ = ["READY", "STARTED", "Ranks"]

STARTED, READY = "started", "ready"
"""What a rank says when it can join the group, and when it has loaded its share."""

_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.2


class Ranks:
    """Ranks 1 and up.

    Args:
        spec: What they are told.
    """

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection[object, object]] = []

    @classmethod
    def start(cls, spec: RankSpec) -> Ranks:
        """Start the processes."""
        ranks = cls(spec)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        for rank in range(1, spec.num_ranks):
            ours, theirs = Pipe()
            command = [sys.executable, "-m", "services.engine.parallel_rank", str(theirs.fileno()), str(rank)]
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                env=environment,
            )
            theirs.close()
            ranks._processes.append(process)
            ranks._pipes.append(ours)
            with suppress(OSError):  # it is gone already: `wait` tells
                ours.send(spec)
        return ranks

    def wait(self, state: str) -> None:
        """Wait until every rank says that it has come so far.

        Raises:
            EngineLostError: One failed, or was late.
        """
        deadline = time.monotonic() + self._spec.timeout_s
        for rank, pipe in enumerate(self._pipes, start=1):
            while not pipe.poll(_POLL_S):
                if time.monotonic() > deadline:
                    raise EngineLostError(f"rank {rank} was not {state} within {self._spec.timeout_s:g} s")
            try:
                answer = pipe.recv()
            except (EOFError, OSError):
                answer = None
            if answer != state:
                raise EngineLostError(self.why_lost() or f"rank {rank} ended before it was {state}")

    def send(self, order: object) -> None:
        """Give all ranks an order.

        Raises:
            EngineLostError: One is gone.
        """
        reason = self.why_lost()
        if reason:
            raise EngineLostError(reason)
        try:
            for pipe in self._pipes:
                pipe.send(order)
        except OSError as error:
            raise EngineLostError(self.why_lost() or f"a rank takes no orders: {error}") from error

    def why_lost(self) -> str:
        """Return which rank ended, and how; empty while all run."""
        for rank, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                return f"rank {rank} (process {process.pid}) ended with status {process.returncode}"
        return ""

    def stop(self) -> None:
        """End them all: first by closing their pipes, then by force."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_TIMEOUT_S)
        self._spec.forget_meeting()
