"""Lets work that nobody waits for run on cores that nobody else wants."""

from __future__ import annotations

import functools
import os
import threading
from contextlib import suppress

__all__ = ["GivingWay", "can_give_way"]

_TRIAL_TIMEOUT_S = 5.0


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
    thread.join(_TRIAL_TIMEOUT_S)  # on cores that are all taken it may never get a turn: then it is of no use
    return bool(succeeded)


class GivingWay:
    """Runs the thread that enters it at idle priority: whoever else is ready on its core goes first.

    On shared cores draft-ahead would else take time from the event loops that carry the verdict it waits for.
    Only where `can_give_way`, and for short work: a thread that waits for a core with Python's lock in hand
    keeps the others waiting.
    """

    def __init__(self) -> None:
        self._usual = self._thread_id = 0
        self._is_idle = False

    def __enter__(self) -> None:
        """Take idle priority.

        Raises:
            OSError: The system does not allow it.
        """
        self._usual, self._thread_id = os.sched_getscheduler(0), threading.get_native_id()
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        self._is_idle = True

    def __exit__(self, *_: object) -> None:
        """Take the usual priority again."""
        self._is_idle = False
        os.sched_setscheduler(0, self._usual, os.sched_param(0))

    def hurry(self) -> None:
        """Give the thread its usual priority now, from another one: somebody waits for it."""
        if self._is_idle:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setscheduler(self._thread_id, self._usual, os.sched_param(0))
