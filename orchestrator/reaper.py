"""Leaves no process behind: every descendant is found again and ended, whoever its parent was."""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from collections.abc import Callable

import psutil

__all__ = ["adopt_orphans", "die_with_parent", "end_descendants"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, so that `end_descendants` finds them (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Ask for SIGTERM when the parent of this process ends, be it by kill -9 (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def end_descendants(grace_s: float = 3.0) -> int:
    """Terminate, then kill, every process below this one; return how many there were."""
    found = psutil.Process().children(recursive=True)
    _signal_all(found, psutil.Process.terminate)
    _, alive = psutil.wait_procs(found, timeout=grace_s)
    deadline = time.monotonic() + grace_s
    # Dying processes may leave new orphans.
    while alive and time.monotonic() < deadline:
        _signal_all(alive, psutil.Process.kill)
        psutil.wait_procs(alive, timeout=1.0)
        alive = psutil.Process().children(recursive=True)
    return len(found)


def _signal_all(processes: list[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        try:
            send(process)
        except psutil.NoSuchProcess:
            pass
