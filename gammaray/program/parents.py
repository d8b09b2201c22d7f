"""Ends a process with its parent, on Linux; elsewhere it stays.

As a program, `python parents.py PARENT COMMAND [ARGUMENT ...]`, it becomes a command that ends with the
process that started it, whose id is PARENT.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(signal_number: int) -> None:
    """Request a signal when the thread that started this process ends, even by SIGKILL; exec keeps that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def main(parent: int, command: list[str]) -> None:
    """Become a command, unless the parent has ended already."""
    end_with_parent(signal.SIGTERM)
    if sys.platform == "linux" and os.getppid() != parent:
        sys.exit("the starting process is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
