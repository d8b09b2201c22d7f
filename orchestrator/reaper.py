"""Leaves no process behind, however the launcher ends.

What belongs to a cluster is known by a variable in its environment, which every process hands down to those
it starts: parents may be long gone. A guardian, a process of its own, waits for the end of the launcher, be
it by kill -9, and then ends what is left and removes the cluster's directory.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

__all__ = ["MARK", "Guardian", "die_with_parent", "end_marked", "marked"]

MARK = "GAMMARAY_CLUSTER_ID"
"""The variable; it must be set before the first process of the cluster starts."""

_PR_SET_PDEATHSIG = 1
_KILL_TIMEOUT_S = 10.0


class Guardian:
    """A process that cleans up once this one is gone.

    Args:
        cluster_id: Value of `MARK` in the cluster's processes. Must not yet be in this one's environment.
        directory: Removed in the end.
    """

    def __init__(self, cluster_id: str, directory: Path) -> None:
        # Its standard input ends when the last holder of the other end does: this process. A session of its
        # own keeps Ctrl-C from it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.reaper", cluster_id, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self, timeout_s: float = 15.0) -> None:
        """Let it clean up now, and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def die_with_parent() -> None:
    """Ask for SIGTERM when the parent of this process ends, be it by kill -9 (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def end_marked(cluster_id: str, grace_s: float = 2.0) -> int:
    """Terminate, then kill, every process of a cluster; return how many there were."""
    found = marked(cluster_id)
    _signal_all(found, psutil.Process.terminate)
    _, alive = psutil.wait_procs(found, timeout=grace_s)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    # Again and again: a process that is about to end may start another.
    while alive and time.monotonic() < deadline:
        _signal_all(alive, psutil.Process.kill)
        psutil.wait_procs(alive, timeout=1.0)
        alive = marked(cluster_id)
    return len(found)


def marked(cluster_id: str) -> list[psutil.Process]:
    """Return the processes of a cluster; the launcher is none of them, as it set the mark after its start."""
    found = []
    for process in psutil.process_iter():
        try:
            if _has_mark(process, cluster_id) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):  # it ended, or belongs to somebody else
            continue
    return found


def _has_mark(process: psutil.Process, cluster_id: str) -> bool:
    try:
        # psutil stops at the gap that a process leaves here when it changes its title, as Ray's do.
        return f"{MARK}={cluster_id}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(
            b"\0"
        )
    except FileNotFoundError:  # no such thing on this system, or it ended
        return bool(process.environ().get(MARK) == cluster_id)


def _signal_all(processes: list[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        try:
            send(process)
        except psutil.Error:
            continue


def _guard(cluster_id: str, directory: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it goes last
    while os.read(sys.stdin.fileno(), 1):
        pass
    end_marked(cluster_id)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _guard(*sys.argv[1:])
