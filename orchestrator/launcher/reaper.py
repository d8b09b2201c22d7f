"""Ends all processes of a cluster, however the launcher ends.

A process belongs to a cluster if its environment has the cluster's variable. Child processes inherit it, so
it identifies them even after their parents have ended. Descendants of such a process belong to the cluster,
too. A guardian process waits for the launcher to end, even by kill -9, then ends the remaining processes and
removes the cluster's directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

MARK = "GAMMARAY_CLUSTER_ID"
"""Environment variable with the cluster's id; set it before the first process of the cluster starts."""

_KILL_TIMEOUT_S = 10.0


class Guardian:
    """A process that cleans up once this process has ended, and removes a directory in the end.

    Its `cluster_id` is the value of `MARK` in the cluster's processes, but not yet in this one's environment.
    """

    def __init__(self, cluster_id: str, directory: Path) -> None:
        # Its standard input reaches end of file when this process, the pipe's only writer, ends. In its own
        # session it does not receive Ctrl-C.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.launcher.reaper", cluster_id, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self, timeout_s: float = 30.0) -> None:
        """Make it clean up now, and wait; the timeout exceeds what `end_marked` takes on a busy machine."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def children_named(names: Collection[str]) -> dict[psutil.Process, str]:
    """Return the running children of this process that have one of these names, with their names."""
    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it may end meanwhile
            if runs(child) and (name := child.name()) in names:
                found[child] = name
    return found


def end_marked(cluster_id: str, grace_s: float = 2.0) -> int:
    """Terminate, then kill, every process of a cluster; return how many there were."""
    known = set(found := marked(cluster_id))
    _signal_all(found, psutil.Process.terminate)
    psutil.wait_procs(found, timeout=grace_s)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    # Repeat: a process that is about to end may start another, and a process that lost its mark is known only
    # from an earlier scan, when its parent still ran.
    while time.monotonic() < deadline:
        known.update(marked(cluster_id))
        alive = [process for process in known if runs(process)]
        if not alive:
            break
        _signal_all(alive, psutil.Process.kill)
        psutil.wait_procs(alive, timeout=1.0)
    return len(known)


def marked(cluster_id: str) -> list[psutil.Process]:
    """Return the processes of a cluster, without the launcher, which set the mark after its start.

    A process that changes its title may overwrite a part of its environment, and Ray starts its agents with
    the variables in any order, so descendants of marked processes are included.
    """
    found: dict[psutil.Process, None] = {}
    for process in psutil.process_iter():
        if process not in found and runs(process) and _has_mark(process, cluster_id):
            found[process] = None
            with contextlib.suppress(psutil.Error):  # it ended
                found.update(dict.fromkeys(process.children(recursive=True)))
    return list(filter(runs, found))


def runs(process: psutil.Process) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _has_mark(process: psutil.Process, cluster_id: str) -> bool:
    mark = f"{MARK}={cluster_id}".encode()
    try:
        # psutil stops at the gap left by a process that changes its title, as Ray's processes do.
        return mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except FileNotFoundError:  # no /proc on this system, or the process ended
        with contextlib.suppress(psutil.Error, OSError):
            return bool(process.environ().get(MARK) == cluster_id)
    except OSError:  # it belongs to another user
        pass
    return False


def _signal_all(processes: list[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        _leave_idle_priority(process)
        with contextlib.suppress(psutil.Error):
            send(process)


def _leave_idle_priority(process: psutil.Process) -> None:
    """Give a process that trains at idle priority a share of busy processors, which it needs to end.

    Only root may; where it is not allowed, the process ends once a processor has nothing else to do.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(psutil.Error, OSError):
        for thread in process.threads():
            if os.sched_getscheduler(thread.id) == os.SCHED_IDLE:
                os.sched_setscheduler(thread.id, os.SCHED_OTHER, os.sched_param(0))


def _guard(cluster_id: str, directory: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it must outlive the launcher
    while os.read(sys.stdin.fileno(), 1):
        pass
    end_marked(cluster_id)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _guard(*sys.argv[1:])
