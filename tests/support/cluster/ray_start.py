"""Starts of Ray on a machine that may be busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from orchestrator.launcher.reaper import end_marked

NUM_TRIES = 4
T = TypeVar("T")


def patiently(start: Callable[[], T], cluster_id: str) -> T:
    """Return what `start` does, tried again as by the launcher: Ray gives up after 30 s, be it only late.

    Args:
        start: Starts Ray.
        cluster_id: The mark of its processes; those of a start that failed are ended.
    """
    for _ in range(NUM_TRIES - 1):
        try:
            return start()
        except Exception:
            end_marked(cluster_id)
    return start()
