"""Processes of a cluster that are killed during streams."""

import contextlib
from collections.abc import Sequence

import psutil

from gammaray import Client, GammarayError, RetryPolicy
from orchestrator.launcher.reaper import runs
from tests.support.cluster.cluster_helpers import Cluster, eventually

RECOVERY_S = 240.0
"""For a replica to be noticed as dead and replaced: its process alone takes ten seconds to start on a quiet
machine, and over a minute on a busy one."""

PATIENT = RetryPolicy(resume_s=RECOVERY_S)


def two_orchestrators(cluster: Cluster) -> list[psutil.Process]:
    """Wait until the cluster has recovered from the previous test, and return its two orchestrators.

    Call it before a stream begins: on a busy machine it may take longer than the stream.
    """
    found: set[int] = set()

    def have_both_settled() -> bool:
        nonlocal found
        views = []
        try:
            for _ in range(4):  # a new connection goes to the next one
                with Client(cluster.grpc) as client:
                    streamed = client.status(timeout_s=30)
                views.append({p.pid for p in streamed if p.role == "orchestrator" and p.healthy})
        except GammarayError:
            return False
        found = views[0]
        return len(found) == 2 and views.count(found) == len(views) and all(map(_is_running, found))

    assert eventually(have_both_settled, RECOVERY_S), found
    return [psutil.Process(pid) for pid in found]


def kill(processes: Sequence[psutil.Process], number: int) -> None:
    """Send a signal to processes; one may have been replaced in the meantime."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _is_running(pid: int) -> bool:
    try:
        return runs(psutil.Process(pid))
    except psutil.Error:
        return False
