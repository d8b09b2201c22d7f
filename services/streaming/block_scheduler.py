"""What the engine's thread, the streams and a worker need from a scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from gammaray.errors import GammarayError
from services.engine.core.kv_cache import CacheStats
from services.scheduling.block_queue import TaskT
from services.scheduling.grammars import Grammars
from services.scheduling.load import LoadCounters
from services.scheduling.metrics import WorkerMeter
from services.scheduling.tasks import Release, Reply


class BlockScheduler(Protocol[TaskT]):
    """Serves blocks of many sessions; `services.scheduling.scheduler.Scheduler` does so with an `Engine`.

    `EngineThread` builds and drives it in one thread: all methods run there, between two steps, except those
    that say that any thread may call them.
    """

    @property
    def meter(self) -> WorkerMeter:
        """The worker's metrics; the scheduler counts its steps and blocks in it."""

    @property
    def grammars(self) -> Grammars | None:
        """Compiles the sessions' grammars before their blocks are submitted; None: sessions have none.

        Any thread may read it.
        """

    @property
    def step_timeout_s(self) -> float | None:
        """After how many seconds a step counts as stuck; None: never. Any thread may read it."""

    @property
    def num_queued(self) -> int:
        """Blocks that wait or run; any thread may read it."""

    @property
    def is_idle(self) -> bool:
        """Whether no block waits for an answer; there may be other work."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do; if not, the thread waits for the next command."""

    def preempt(self, tasks: Sequence[TaskT], /) -> None:
        """Shorten other work because `tasks` are about to be submitted; any thread may call it."""

    def submit(self, tasks: Sequence[TaskT], /) -> None:
        """Queue blocks; those of one session are served one after another."""

    def release(self, endings: Iterable[Release], /) -> None:
        """End sessions: release their caches and answer their blocks with `CancelledError`."""

    def step(self) -> list[tuple[TaskT, Reply]]:
        """Serve as many blocks as fit, and return the answers that are ready.

        Raises:
            EngineLostError: No later step can succeed: the thread answers all blocks and ends.
            Exception: The step failed, and the thread calls `fail_all`.
        """

    def fail_all(self, error: GammarayError, /) -> None:
        """Answer every block with `error`, with the next `step`, and drop every session."""

    def check(self) -> None:
        """Return if the engine can run another step; any thread may call it, also during a step.

        Raises:
            EngineLostError: It cannot, such as when one of its processes has ended.
        """

    def stats(self) -> CacheStats:
        """Return the counters of the cache of keys and values; any thread may call it."""

    def load(self) -> LoadCounters:
        """Return the load counters so far."""

    def close(self) -> None:
        """End what the scheduler and its engine started; no other method is called afterwards."""
