"""Computes the masks of sessions with a grammar in threads, so that other sessions do not wait for them.

A mask takes 50 µs as a rule, and seconds for a regular expression with thousands of optional parts. So a step
computes masks during its forward and waits for them at most `MAX_WAIT_S` after it. A block whose masks are
late leaves the step without a verdict; it is fed again when they are there. llguidance releases the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from gammaray.errors import GammarayError
from services.scheduling.scheduler import BlockQueue, Work
from services.scheduling.sessions import SessionCopy

MAX_WAIT_S = 0.03
"""How long a step waits for masks after its forward, for all of its blocks together."""

NUM_THREADS = 4
POLL_S = 0.005


class MaskThreads:
    """Threads that compute masks; used by the engine's thread.

    A session whose last masks took longer than `MAX_WAIT_S` is slow. Slow sessions have a thread of their
    own, so that the masks of other sessions do not wait for theirs.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="masks")
        self._slow_thread = ThreadPoolExecutor(1, thread_name_prefix="slow-masks")

    def begin(self, work: Work[Any], compute: Callable[[], None]) -> None:
        """Begin to compute the masks of a block whose session has a grammar, if they were not begun.

        Nothing may change the session meanwhile. `session.masking` is their future until they are there; its
        result is None, or a GammarayError.
        """
        session = work.session
        if session.spec.params.grammar and not work.has_masks:
            work.has_masks = True
            threads = self._slow_thread if session.has_slow_masks else self._threads
            session.masking = threads.submit(compute_masks, work, compute)

    def close(self) -> None:
        """Begin no further masks."""
        for threads in (self._threads, self._slow_thread):
            threads.shutdown(wait=False, cancel_futures=True)


def compute_masks(work: Work[Any], compute: Callable[[], None]) -> GammarayError | None:
    """Compute the masks of a block, count the time, and return the error if there is one."""
    began = time.perf_counter()
    try:
        compute()
    except GammarayError as error:
        return error
    finally:
        took_s = time.perf_counter() - began
        work.timing.mask_us += int(took_s * 1e6)
        work.session.has_slow_masks = took_s > MAX_WAIT_S
    return None


def wait_for_masks(sessions: Iterable[SessionCopy]) -> None:
    """Wait for the masks of these sessions, which are late after `MAX_WAIT_S`."""
    wait(_masking(sessions), MAX_WAIT_S)


def wait_for_any(queue: BlockQueue[Any, Any]) -> None:
    """Wait a moment for the masks of one of the sessions with blocks, as there is nothing else to do."""
    sessions = map(queue.sessions.find, (*queue.running, *queue.waiting))
    present = (session for session in sessions if session is not None and session.is_masking)
    wait(_masking(present), POLL_S, FIRST_COMPLETED)


def _masking(sessions: Iterable[SessionCopy]) -> list[Future[GammarayError | None]]:
    return [session.masking for session in sessions if session.masking is not None]
