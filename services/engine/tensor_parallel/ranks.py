"""The ranks of a tensor-parallel engine: their process group, and the child processes of rank 0."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from gammaray.errors import FailedPreconditionError
from services.engine.core.errors import EngineLostError

__all__ = [
    "READY",
    "STARTED",
    "RankSpec",
    "Ranks",
    "check_alone",
    "join_group",
    "leave_group",
    "meeting_place",
]


@dataclass(frozen=True)
class RankSpec:
    """Parameters of all ranks; see `ParallelEngine.load_parallel`.

    Attributes:
        meeting: File store through which the ranks find each other; in a private folder, so that no other
            process can join.
    """

    model: str
    num_ranks: int
    device: str
    dtype: str
    threads: int
    cache_budget_bytes: int
    timeout_s: float
    meeting: str

    def forget_meeting(self) -> None:
        """Remove the file and its folder; every rank does when it ends, so that no file is left over."""
        shutil.rmtree(Path(self.meeting).parent, ignore_errors=True)


def meeting_place() -> str:
    """Return the path of a file in a new private folder."""
    return str(Path(tempfile.mkdtemp(prefix="gammaray-ranks-")) / "meeting")


def check_alone() -> None:
    """Check that this process has not joined a group: torch supports one per process.

    Raises:
        FailedPreconditionError: It has.
    """
    if dist.is_initialized():
        raise FailedPreconditionError("this process already takes part in a parallel model")


def join_group(spec: RankSpec, rank: int) -> None:
    """Make this process one of the ranks; returns when all have joined.

    Raises:
        torch.distributed.DistError: The others did not join in time.
    """
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.set_device(rank)
    # transformers and gloo read these.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(spec.num_ranks))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks need not be reachable from the network
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        # Documented, but torch's own types do not export it.
        store=dist.FileStore(spec.meeting, spec.num_ranks),  # type: ignore[attr-defined]
        rank=rank,
        world_size=spec.num_ranks,
        timeout=timedelta(seconds=spec.timeout_s),
        device_id=torch.device("cuda", rank) if is_gpu else None,
    )


def leave_group() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


STARTED, READY = "started", "ready"
"""Messages of a rank when it can join the group, and when it has loaded its share."""

_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.2


class Ranks:
    """Ranks 1 and up.

    Args:
        spec: Parameters sent to them.
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
            command = [
                sys.executable,
                "-m",
                "services.engine.tensor_parallel.rank_main",
                str(theirs.fileno()),
                str(rank),
            ]
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
            with suppress(OSError):  # it has already ended: `wait` reports it
                ours.send(spec)
        return ranks

    def wait(self, state: str) -> None:
        """Wait until every rank reports `state`.

        Raises:
            EngineLostError: A rank failed or timed out.
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
        """Send an order to all ranks.

        Raises:
            EngineLostError: A rank has ended.
        """
        reason = self.why_lost()
        if reason:
            raise EngineLostError(reason)
        try:
            for pipe in self._pipes:
                pipe.send(order)
        except OSError as error:
            raise EngineLostError(self.why_lost() or f"failed to send to a rank: {error}") from error

    def why_lost(self) -> str:
        """Return which rank ended, with its exit status; empty while all run."""
        for rank, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                return f"rank {rank} (process {process.pid}) ended with status {process.returncode}"
        return ""

    def stop(self) -> None:
        """End all ranks: first by closing their pipes, then by killing them."""
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
