"""The process group of the ranks: gloo between CPU processes, NCCL between GPUs, on one machine."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gammaray.errors import FailedPreconditionError

__all__ = ["RankSpec", "check_alone", "join_group", "leave_group", "meeting_place"]


@dataclass(frozen=True)
class RankSpec:
    """What every rank must know; see `ParallelEngine.load_parallel`.

    Attributes:
        meeting: A file by which the ranks find each other, for as long as they live; private, so that nobody
            else joins.
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
        """Remove the file; every rank does, at its end, so that none is left whoever dies first."""
        shutil.rmtree(Path(self.meeting).parent, ignore_errors=True)


def meeting_place() -> str:
    """Return the path of a file in a new private folder."""
    return str(Path(tempfile.mkdtemp(prefix="gammaray-ranks-")) / "meeting")


def check_alone() -> None:
    """Check that this process is in no group yet: torch knows one per process.

    Raises:
        FailedPreconditionError: It is.
    """
    if dist.is_initialized():
        raise FailedPreconditionError("this process already takes part in a parallel model")


def join_group(spec: RankSpec, rank: int) -> None:
    """Make this process one of the ranks; returns when all are there.

    Raises:
        torch.distributed.DistError: The others did not come in time.
    """
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.set_device(rank)
    # transformers and gloo read these.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(spec.num_ranks))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody else on the network need reach the ranks
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
    """Forget the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
