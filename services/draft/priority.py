"""Lets work that nobody waits for run on cores that nobody else wants."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["can_give_way", "giving_way"]


@functools.cache
def can_give_way() -> bool:
    """Whether a thread of this process may take idle priority, and its usual one again after it.

    The way back needs CAP_SYS_NICE or an RLIMIT_NICE of 20 (see sched(7)): without them a thread would keep
    idle priority for good. Tried once, in a thread of its own.
    """
    if not hasattr(os, "SCHED_IDLE"):
        return False
    succeeded: list[bool] = []

    def attempt() -> None:
        usual = os.sched_getscheduler(0)
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, usual, os.sched_param(0))
        except OSError:
            return
        succeeded.append(True)

    thread = threading.Thread(target=attempt, name="idle-priority-check")
    thread.start()
    thread.join()
    return bool(succeeded)


@contextmanager
def giving_way() -> Iterator[None]:
    """Run the calling thread at idle priority: whoever else is ready on its core goes first.

    On shared cores draft-ahead would else take time from the event loops that carry the verdict it waits for.
    Only where `can_give_way`, and for short work: a thread that waits for a core with Python's lock in hand
    keeps the others waiting.

    Raises:
        OSError: The system does not allow it.
    """
    usual = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, usual, os.sched_param(0))
