"""Blocks that wait for an engine or are in it, and the sessions they belong to, whatever the engine.

At most one block per session runs at a time; the others wait for it. Expired and cancelled blocks are
dropped before each step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar, cast

from gammaray.errors import CancelledError, DeadlineExceededError, GammarayError
from services.engine.core.kv_cache import CacheStats
from services.scheduling.grammars import Grammars
from services.scheduling.load import LoadCounters
from services.scheduling.metrics import WorkerMeter
from services.scheduling.sessions import SessionCopy, SessionTable
from services.scheduling.tasks import Release, Reply, Task, Timing

MAX_SESSIONS = 4096
"""Upper bound of sessions whose token ids a worker keeps; their KV cache has its own budget."""

TaskT = TypeVar("TaskT", bound=Task)


@dataclass(slots=True, eq=False)
class Work(Generic[TaskT]):
    """A block being worked on."""

    task: TaskT
    session: SessionCopy  # its session, with the committed tokens
    timing: Timing = field(default_factory=Timing, kw_only=True)  # what it has cost so far
    is_started: bool = field(default=False, kw_only=True)  # whether a forward has included it
    has_masks: bool = field(default=False, kw_only=True)  # whether the masks of its grammar were begun


WorkT = TypeVar("WorkT", bound="Work[Any]")


class BlockQueue(ABC, Generic[TaskT, WorkT]):
    """The scheduler of a worker: admits blocks to an engine and keeps their answers until the step ends.

    `EngineThread` builds and drives it in one thread: all methods run there, between two steps, except those
    that say that any thread may call them.

    Args:
        vocab_size: Number of token ids of the sessions.
        device: Device on which their noise is computed.
        grammars: Compiles the sessions' grammars; None: sessions with one are refused.

    Attributes:
        step_timeout_s: After how many seconds a step counts as stuck; None: never.
    """

    role: ClassVar[str]
    step_timeout_s: float | None = None

    def __init__(self, vocab_size: int, device: str, grammars: Grammars | None) -> None:
        self.grammars = grammars
        self._waiting: dict[str, deque[TaskT]] = {}
        self._running: dict[str, WorkT] = {}
        self._replies: list[tuple[TaskT, Reply]] = []
        self._block_s = 0.0
        self.meter = WorkerMeter(self.role)
        self.meter.watch(lambda: self.num_queued, self.stats)
        is_busy = self._running.__contains__
        self.sessions = SessionTable(MAX_SESSIONS, vocab_size, device, is_busy, self._forget)

    @abstractmethod
    def step(self) -> list[tuple[TaskT, Reply]]:
        """Serve as many blocks as fit, and return the answers that are ready.

        Raises:
            EngineLostError: No later step can succeed: the thread answers all blocks and ends.
            Exception: The step failed, and the thread calls `fail_all`.
        """

    def check(self) -> None:
        """Raise EngineLostError if no further step can run; any thread may call it, also during a step.

        An engine of this process is lost only by an error of its own step.
        """

    def close(self) -> None:
        """End what the scheduler and its engine started; no other method is called afterwards."""

    @abstractmethod
    def stats(self) -> CacheStats:
        """Return the counters of the engine's cache; callable from any thread."""

    @abstractmethod
    def _try_start(self, task: TaskT) -> WorkT | object:
        """Return the work of a task, or its outcome if no forward is needed or possible."""

    @abstractmethod
    def _forget(self, session: SessionCopy) -> None:
        """Release what the engine holds of a session that the table drops."""

    def _withdraw(self, work: WorkT) -> None:
        """Withdraw the request to the engine for a block that is no longer needed."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return not self.is_idle

    @property
    def is_idle(self) -> bool:
        """Whether no block waits for an answer; there may be other work."""
        return not (self._running or self._waiting or self._replies)

    @property
    def num_queued(self) -> int:
        """Blocks waiting or running; may be read from any thread."""
        return len(self._running) + sum(map(len, tuple(self._waiting.values())))

    def load(self) -> LoadCounters:
        """Return the load counters so far."""
        stats = self.stats()
        cache_use = stats.cache_bytes / stats.cache_budget_bytes
        return LoadCounters(block_s=self._block_s, busy_s=self.meter.step_s.total, cache_use=cache_use)

    def submit(self, tasks: Iterable[TaskT]) -> None:
        """Queue blocks; those of one session are served one after another."""
        for task in tasks:
            self._waiting.setdefault(task.session_id, deque()).append(task)

    def preempt(self, tasks: Iterable[TaskT]) -> None:
        """Shorten speculative work because `tasks` are about to be submitted; callable from any thread."""

    def release(self, endings: Iterable[Release]) -> None:
        """End sessions: release their caches and cancel their blocks."""
        for session_id, epoch, forgets in endings:
            if epoch == 0 or epoch >= self._newest_epoch(session_id):
                if forgets:
                    self._forget_prefix(session_id)
                self._end(session_id, CancelledError(f"session {session_id} was released"))

    @abstractmethod
    def _forget_prefix(self, session_id: str) -> None:
        """Drop what the cache retains of a session for others with the same prefix."""

    def _newest_epoch(self, session_id: str) -> int:
        waiting = max((task.epoch for task in self._waiting.get(session_id, ())), default=0)
        return max(waiting, self.sessions.epoch(session_id))

    def fail_all(self, error: GammarayError) -> None:
        """Answer every block with `error` and drop every session."""
        for session_id in {*self._waiting, *self._running, *self.sessions}:
            self._end(session_id, error)

    def _end(self, session_id: str, error: GammarayError) -> None:
        for task in self._waiting.pop(session_id, ()):
            self._reply(task, error)
        running = self._running.pop(session_id, None)
        if running is not None:
            self._withdraw(running)
            self._reply(running.task, error, running.timing)
        self.sessions.drop(session_id)

    def _drop_dead(self) -> None:
        now = time.monotonic()
        for session_id, running in list(self._running.items()):
            error = _reason_to_drop(running.task, now)
            if error is not None:
                del self._running[session_id]
                self._withdraw(running)
                self._reply(running.task, error, running.timing)

    def _admit(self) -> None:
        now = time.monotonic()
        for session_id in list(self._waiting):
            queue = self._waiting[session_id]
            while queue and session_id not in self._running and not self._is_masking(session_id):
                task = queue.popleft()
                outcome = _reason_to_drop(task, now) or self._try_start(task)
                if isinstance(outcome, Work):
                    self._running[session_id] = cast("WorkT", outcome)
                else:
                    self._reply(task, outcome)
            if not queue:
                del self._waiting[session_id]

    def _is_masking(self, session_id: str) -> bool:
        session = self.sessions.find(session_id)
        return session is not None and session.is_masking

    def _note_start(self, work: WorkT) -> None:
        """Note how long a block waited before the first forward that includes it."""
        if not work.is_started:
            work.is_started = True
            waited_us = int((time.monotonic() - work.task.arrived) * 1e6) - work.timing.head_us
            work.timing.queue_us = max(0, waited_us)

    def _reply(self, task: TaskT, outcome: object, timing: Timing | None = None) -> None:
        self._block_s += time.monotonic() - task.arrived
        outcome = None if task.is_notice else outcome
        self._replies.append((task, Reply(task.request_id, task.session_id, outcome, timing or Timing())))


def _reason_to_drop(task: Task, now: float) -> GammarayError | None:
    if task.cancelled:
        return CancelledError("the stream of the block was closed")
    if now > task.deadline:
        return DeadlineExceededError(f"not finished within {(now - task.arrived) * 1000:.0f} ms")
    return None
