"""Lets work that nobody waits for run on cores that nobody else wants."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["CAN_GIVE_WAY", "giving_way"]

CAN_GIVE_WAY = hasattr(os, "SCHED_IDLE")
"""Whether the system knows idle priority."""


@contextmanager
def giving_way() -> Iterator[None]:
    """Run the calling thread at idle priority: whoever else is ready on its core goes first.

    On shared cores draft-ahead would else take time from the event loops that carry the verdict it waits for.
    For short work only: a thread that waits for a core with Python's lock in hand keeps the others waiting.
    """
    usual = os.sched_getscheduler(0)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, usual, os.sched_param(0))
