"""What serves a worker's blocks: what its thread knows of a scheduler, and the queue that each of them has.

At most one block per session runs at a time; the others wait for it. Expired and cancelled blocks are
dropped before each step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from ctypes import c_int32
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from gammaray.errors import CancelledError, DeadlineExceededError, GammarayError
from services.engine.core.errors import EngineLostError
from services.engine.core.kv_cache import CacheStats
from services.scheduling.grammars import Grammars
from services.scheduling.load import LoadCounters
from services.scheduling.metrics import WorkerMeter
from services.scheduling.sessions import SessionCopy, SessionTable
from services.scheduling.tasks import NeedTokens, Release, Reply, Task, Timing

MAX_SESSIONS = 4096
"""Upper bound of sessions whose token ids a worker keeps; their KV cache has its own budget."""

TaskT = TypeVar("TaskT", bound=Task)


@dataclass(slots=True, eq=False)
class Work(Generic[TaskT]):
    task: TaskT
    session: SessionCopy  # its session, with the committed tokens
    timing: Timing = field(default_factory=Timing, kw_only=True)  # what it has cost so far
    is_started: bool = field(default=False, kw_only=True)  # whether a forward has included it
    has_masks: bool = field(default=False, kw_only=True)  # whether the masks of its grammar were begun


WorkT = TypeVar("WorkT", bound="Work[Any]")
Start = Callable[[TaskT, SessionCopy], object]
"""Returns the `Work` of a block whose session has the committed tokens, or its outcome if the engine need not
or cannot compute it."""


class Scheduler(Protocol[TaskT]):
    """The scheduler of a worker: takes blocks from its queue, has an engine compute them, and answers them.

    `EngineThread` builds and drives it in one thread: all methods run there, between two steps, except those
    that say that any thread may call them. `services.own` and `services.vllm` have one for each role.

    Attributes:
        queue: Its blocks and sessions.
        step_timeout_s: After how many seconds a step counts as stuck; None: never.
    """

    role: ClassVar[str]
    queue: BlockQueue[TaskT, Any]
    step_timeout_s: float | None

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def submit(self, tasks: Iterable[TaskT]) -> None:
        """Queue blocks; those of one session are served one after another."""

    def step(self) -> list[tuple[TaskT, Reply]]:
        """Serve as many blocks as fit, and return the answers that are ready.

        Raises:
            EngineLostError: No later step can succeed: the thread answers all blocks and ends.
            Exception: The step failed, and the thread calls `fail_all`.
        """

    def release(self, endings: Iterable[Release]) -> None:
        """End sessions: release their caches and cancel their blocks."""

    def fail_all(self, error: GammarayError) -> None:
        """Answer every block with `error` and drop every session, including the caches of ended sessions."""

    def check(self) -> None:
        """Raise EngineLostError if no further step can run; any thread may call it, also during a step."""

    def close(self) -> None:
        """End what the scheduler and its engine started; no other method is called afterwards."""


class BlockQueue(Generic[TaskT, WorkT]):
    """The blocks of a scheduler: admits them to its engine and keeps their answers until the step ends.

    Args:
        vocab_size: Number of token ids of the sessions.
        device: Device on which their noise is computed.
        grammars: Compiles the sessions' grammars; None: sessions with one are refused.
        stats: Returns the counters of the engine's cache; any thread may call it.
        forget: Releases what the engine holds of a session that the table drops.
        withdraw: Withdraws the request to the engine for a block that is no longer needed.

    Attributes:
        waiting: Blocks that are not admitted, by session.
        running: Admitted blocks by session, oldest first.
        replies: The answers of this step, and work to be traced.
        stop: Not 0 while blocks are about to be submitted: draft-ahead ends with its current forward.
        on_stop: Called when `stop` is set, by the thread that sets it.
    """

    def __init__(
        self,
        role: str,
        vocab_size: int,
        device: str,
        grammars: Grammars | None,
        stats: Callable[[], CacheStats],
        forget: Callable[[SessionCopy], None],
        withdraw: Callable[[WorkT], None] = lambda work: None,
    ) -> None:
        self.grammars, self.stats, self._withdraw = grammars, stats, withdraw
        self.waiting: dict[str, deque[TaskT]] = {}
        self.running: dict[str, WorkT] = {}
        self.replies: list[tuple[TaskT, Reply]] = []
        self.stop = c_int32()
        self.on_stop: Callable[[], None] = lambda: None
        self._block_s = 0.0
        self.meter = WorkerMeter(role, lambda: self.num_queued, stats)
        self.sessions = SessionTable(MAX_SESSIONS, vocab_size, device, self.running.__contains__, forget)

    @property
    def is_idle(self) -> bool:
        """Whether no block waits for an answer; there may be other work."""
        return not (self.running or self.waiting or self.replies)

    @property
    def num_queued(self) -> int:
        """Blocks waiting or running; may be read from any thread."""
        return len(self.running) + sum(map(len, tuple(self.waiting.values())))

    def load(self) -> LoadCounters:
        stats, ahead = self.stats(), self.meter.ahead
        cache_use = stats.cache_bytes / stats.cache_budget_bytes
        return LoadCounters(self._block_s, self.meter.step_s.total, ahead.lookups, ahead.hits, cache_use)

    def preempt(self, tasks: Iterable[TaskT]) -> None:
        """Shorten speculative work because `tasks` are about to be submitted; callable from any thread."""
        if not all(task.is_notice for task in tasks):
            self.stop.value = 1
            self.on_stop()

    def submit(self, tasks: Iterable[TaskT]) -> None:
        for task in tasks:
            if not task.is_notice:
                self.stop.value = 0  # reset: draft-ahead does not run while blocks wait
            self.waiting.setdefault(task.session_id, deque()).append(task)

    def drop_dead(self) -> None:
        """Answer the running blocks that expired or were cancelled."""
        now = time.monotonic()
        for work in list(self.running.values()):
            error = _reason_to_drop(work.task, now)
            if error is not None:
                self.drop(work, error)

    def admit(self, start: Start[TaskT], check: Callable[[TaskT], None] = lambda task: None) -> None:
        """Let the next block of each session run, or answer it.

        `check` raises InvalidArgumentError for a block that cannot be served, before its session changes.
        """
        now = time.monotonic()
        for session_id in list(self.waiting):
            queue = self.waiting[session_id]
            while queue and session_id not in self.running and not self._is_masking(session_id):
                task = queue.popleft()
                outcome = _reason_to_drop(task, now) or self._try_start(task, start, check)
                if isinstance(outcome, Work):
                    self.running[session_id] = cast("WorkT", outcome)
                else:
                    self._reply(task, outcome)
            if not queue:
                del self.waiting[session_id]

    def _is_masking(self, session_id: str) -> bool:
        session = self.sessions.find(session_id)
        return session is not None and session.is_masking

    def _try_start(self, task: TaskT, start: Start[TaskT], check: Callable[[TaskT], None]) -> object:
        try:
            check(task)
            if task.is_conditional:
                if not self.sessions.is_at(task):
                    return NeedTokens(task.context_start)
                task.arrived = time.monotonic()  # the block before it has delayed it until now
            session = self.sessions.admit(task)
            return session if isinstance(session, NeedTokens) else start(task, session)
        except EngineLostError:
            raise
        except GammarayError as error:
            return error

    def note_start(self, work: WorkT) -> None:
        """Note how long a block waited before the first forward that includes it."""
        if not work.is_started:
            work.is_started = True
            waited_us = int((time.monotonic() - work.task.arrived) * 1e6) - work.timing.head_us
            work.timing.queue_us = max(0, waited_us)

    def answer(self, work: WorkT, outcome: object) -> None:
        del self.running[work.task.session_id]
        self._reply(work.task, outcome, work.timing)

    def send(self, work: WorkT, outcome: object) -> None:
        """Send a part of what a block gets; the rest counts as another block, which arrives now."""
        self._reply(work.task, outcome, work.timing)
        work.task.arrived, work.timing = time.monotonic(), Timing()
        self.running[work.task.session_id] = self.running.pop(work.task.session_id)  # oldest first

    def drop(self, work: WorkT, error: GammarayError) -> None:
        """Answer a block that the engine need not compute any more."""
        self._withdraw(work)
        self.answer(work, error)

    def _reply(self, task: TaskT, outcome: object, timing: Timing | None = None) -> None:
        self._block_s += time.monotonic() - task.arrived
        outcome = None if task.is_notice else outcome
        reply = Reply(task.request_id, task.session_id, outcome, timing or Timing(), task.is_ahead)
        self.replies.append((task, reply))

    def take_replies(self) -> list[tuple[TaskT, Reply]]:
        """Return the answers of a step that ends."""
        replies, self.replies = self.replies, []
        return replies

    def release(self, endings: Iterable[Release], forget_prefix: Callable[[str], None]) -> None:
        """End sessions; `forget_prefix` drops what the cache retains of one for others with its prefix."""
        for session_id, epoch, forgets in endings:
            if epoch == 0 or epoch >= self._newest_epoch(session_id):
                if forgets:
                    forget_prefix(session_id)
                self._end(session_id, CancelledError(f"session {session_id} was released"))

    def _newest_epoch(self, session_id: str) -> int:
        waiting = max((task.epoch for task in self.waiting.get(session_id, ())), default=0)
        session = self.sessions.find(session_id)
        return waiting if session is None else max(waiting, session.epoch)

    def fail_all(self, error: GammarayError) -> None:
        """Answer every block with `error` and drop every session."""
        for session_id in {*self.waiting, *self.running, *self.sessions}:
            self._end(session_id, error)

    def _end(self, session_id: str, error: GammarayError) -> None:
        for task in self.waiting.pop(session_id, ()):
            self._reply(task, error)
        if (running := self.running.get(session_id)) is not None:
            self.drop(running, error)
        self.sessions.drop(session_id)


def _reason_to_drop(task: Task, now: float) -> GammarayError | None:
    if task.cancelled:
        return CancelledError("the stream of the block was closed")
    if now > task.deadline:
        return DeadlineExceededError(f"not finished within {(now - task.arrived) * 1000:.0f} ms")
    return None
