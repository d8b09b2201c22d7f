"""Continuous batching: which tokens of which sessions go into the next forward.

One scheduler, two workers: verification feeds a whole proposal in one forward, drafting feeds one token per
forward, both after the committed tokens that are not cached. Everything here runs in the engine's thread.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from gammaray.errors import (
    CancelledError,
    DeadlineExceededError,
    GammarayError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from services.engine.engine import Engine, Feed
from services.engine.errors import CacheFullError
from services.sessions import Session, SessionTable
from services.tasks import NeedTokens, Reply, Task, Timing

__all__ = ["MAX_SESSIONS", "MIN_SHARED_PREFIX", "Running", "Scheduler"]

MAX_SESSIONS = 4096
"""Sessions whose token ids a worker keeps; their KV cache has its own budget."""

MIN_SHARED_PREFIX = 16
"""Shared leading tokens, from which on a cache is copied rather than computed again."""

_log = logging.getLogger(__name__)
TaskT = TypeVar("TaskT", bound=Task)


@dataclass(slots=True, eq=False)
class Running(Generic[TaskT]):
    """A block being worked on.

    Args:
        tail: Tokens behind the committed ones: the proposal's nodes, or the tokens drafted so far.
        parents: Parents of the tail's nodes; None for a chain.
        num_logits: How many of the last tokens need logits in the forward that completes this feed.
    """

    task: TaskT
    session: Session
    tail: list[int]
    num_logits: int
    parents: Sequence[int] | None = None
    timing: Timing = field(default_factory=Timing)
    started: bool = False


class Scheduler(ABC, Generic[TaskT]):
    """Serves blocks of many sessions with one engine; at most one block per session at a time.

    Args:
        engine: The model and its cache.
        max_batch_tokens: Upper bound of tokens per forward.
        prefill_chunk: Upper bound of committed tokens of one session per forward.
    """

    def __init__(self, engine: Engine, *, max_batch_tokens: int, prefill_chunk: int) -> None:
        self.engine = engine
        self.max_batch_tokens, self.prefill_chunk = max_batch_tokens, prefill_chunk
        self._waiting: dict[str, deque[TaskT]] = {}
        self._running: dict[str, Running[TaskT]] = {}
        self._replies: list[tuple[TaskT, Reply]] = []
        self.sessions = SessionTable(
            MAX_SESSIONS, engine.vocab_size, str(engine.device), self._running.__contains__, engine.release
        )

    @abstractmethod
    def _start(self, task: TaskT, session: Session) -> Running[TaskT] | object:
        """Return the work of an admitted task, or its outcome when there is none to do."""

    @abstractmethod
    def _advance(self, running: Running[TaskT], logits: Tensor) -> object | None:
        """Take the logits `[num_logits, vocab_size]` of a completed feed; None asks for another forward."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._running or self._waiting or self._replies)

    @property
    def num_queued(self) -> int:
        """Blocks waiting or running."""
        return len(self._running) + sum(map(len, self._waiting.values()))

    def submit(self, tasks: Iterable[TaskT]) -> None:
        """Queue blocks; those of one session are served one after another."""
        for task in tasks:
            self._waiting.setdefault(task.session_id, deque()).append(task)

    def release(self, session_ids: Iterable[str]) -> None:
        """End sessions: their caches are freed and blocks of theirs that are under way are cancelled."""
        for session_id in session_ids:
            for task in self._waiting.pop(session_id, ()):
                self._reply(task, CancelledError(f"session {session_id} was released"))
            running = self._running.pop(session_id, None)
            if running is not None:
                self._finish(running, CancelledError(f"session {session_id} was released"))
            self.sessions.drop(session_id)

    def fail_all(self, error: GammarayError) -> None:
        """Answer every block with `error` and forget every session."""
        for session_id in [*self._waiting, *self._running, *self.sessions]:
            for task in self._waiting.pop(session_id, ()):
                self._reply(task, error)
            running = self._running.pop(session_id, None)
            if running is not None:
                self._finish(running, error)
            self.sessions.drop(session_id)

    def step(self) -> list[tuple[TaskT, Reply]]:
        """Do one forward for as many blocks as fit and return the answers that are ready."""
        self._drop_dead()
        self._admit()
        batch = self._plan()
        if batch:
            self._forward(batch)
        replies, self._replies = self._replies, []
        return replies

    def _drop_dead(self) -> None:
        now = time.monotonic()
        for session_id, running in list(self._running.items()):
            error = _reason_to_drop(running.task, now)
            if error is not None:
                del self._running[session_id]
                self._finish(running, error)

    def _admit(self) -> None:
        now = time.monotonic()
        for session_id in list(self._waiting):
            queue = self._waiting[session_id]
            while queue and session_id not in self._running:
                task = queue.popleft()
                error = _reason_to_drop(task, now)
                outcome = error if error is not None else self._try_start(task)
                if isinstance(outcome, Running):
                    self._running[session_id] = outcome
                else:
                    self._reply(task, outcome)
            if not queue:
                del self._waiting[session_id]

    def _try_start(self, task: TaskT) -> Running[TaskT] | object:
        try:
            session = self.sessions.admit(task)
            if isinstance(session, NeedTokens):
                return session
            self._match_cache(session)
            return self._start(task, session)
        except GammarayError as error:
            return error

    def _match_cache(self, session: Session) -> None:
        """Drop cached entries that are not the committed tokens; borrow a shared prefix when none is left."""
        cached = self.engine.tokens(session.session_id)
        num_cached, tokens = len(cached), session.tokens
        same, end = min(session.changed_from, num_cached), min(num_cached, len(tokens))
        while same < end and cached[same] == tokens[same]:
            same += 1
        if same < num_cached:
            self.engine.truncate(session.session_id, same)
        if same == 0 and len(tokens) > MIN_SHARED_PREFIX:
            source, shared = self.engine.longest_prefix(tokens[:-1])
            if shared >= MIN_SHARED_PREFIX:
                with suppress(CacheFullError):  # Not both at once: computed anew instead.
                    self.engine.fork(source, session.session_id, shared)

    def _plan(self) -> list[tuple[Running[TaskT], Feed]]:
        """Choose the feeds of the next forward.

        The oldest block always takes part, so none starves; then those that one forward completes, so that
        long prompts do not stall them; what is left of the budget goes to long prompts.
        """
        budget = self.max_batch_tokens
        oldest_and_short: list[tuple[Running[TaskT], int, int]] = []
        long: list[tuple[Running[TaskT], int, int]] = []
        for index, running in enumerate(self._running.values()):
            start, todo = self._todo(running)
            is_short = index == 0 or todo <= max(self.prefill_chunk, running.num_logits)
            (oldest_and_short if is_short else long).append((running, start, todo))
        batch = []
        for running, start, todo in oldest_and_short + long:
            if todo > max(self.prefill_chunk, running.num_logits) or todo > budget:
                size = min(self.prefill_chunk, budget, todo - running.num_logits)
                feed = self._feed(running, start, size, 0)
            else:
                size = todo
                feed = self._feed(running, start, size, running.num_logits)
            if size > 0:
                batch.append((running, feed))
                budget -= size
        return batch

    def _todo(self, running: Running[TaskT]) -> tuple[int, int]:
        """Position to feed from, and number of tokens to feed until the block's logits are there."""
        total = running.task.base_position + len(running.tail)
        start = min(self.engine.length(running.task.session_id), total - running.num_logits)
        return start, total - start

    def _feed(self, running: Running[TaskT], start: int, size: int, num_logits: int) -> Feed:
        base = running.task.base_position
        if start >= base:
            token_ids = running.tail[start - base : start - base + size]
        else:
            token_ids = running.session.tokens[start : start + size]
            token_ids += running.tail[: size - len(token_ids)]
        parents = running.parents if num_logits else None
        return Feed(running.task.session_id, start, token_ids, num_logits, parents)

    def _forward(self, batch: list[tuple[Running[TaskT], Feed]]) -> None:
        began = time.perf_counter()
        now = time.monotonic()
        for running, _ in batch:
            if not running.started:
                running.started = True
                running.timing.queue_us = int((now - running.task.arrived) * 1e6)
        results = self._run_engine(batch)
        forward_us = int((time.perf_counter() - began) * 1e6)
        if results is None:
            return
        done = []
        for (running, feed), logits in zip(batch, results, strict=True):
            if feed.num_logits:
                outcome = self._try_advance(running, logits)
                if outcome is not None:
                    del self._running[running.task.session_id]
                    done.append((running, outcome))
        compute_us = int((time.perf_counter() - began) * 1e6)
        batch_tokens = sum(len(feed.token_ids) for _, feed in batch)
        for running, _ in batch:
            timing = running.timing
            timing.forward_us += forward_us
            timing.compute_us += compute_us
            timing.batch_tokens += batch_tokens
            timing.batch_size = max(timing.batch_size, len(batch))
            timing.num_forwards += 1
        for running, outcome in done:
            self._finish(running, outcome)

    def _run_engine(self, batch: list[tuple[Running[TaskT], Feed]]) -> list[Tensor] | None:
        """Run the forward; None when it failed and the blocks at fault were answered."""
        try:
            return self.engine.step([feed for _, feed in batch])
        except CacheFullError as error:
            if len(batch) > 1:
                # Together they do not fit: the oldest goes alone, which evicts the others, and they follow.
                self._forward(batch[:1])
                return None
            self._fail(batch, ResourceExhaustedError(f"the KV cache budget is too small: {error}"))
        except Exception as error:
            _log.exception("a forward over %d sessions failed", len(batch))
            self._fail(batch, InternalError(f"the forward failed: {type(error).__name__}: {error}"))
        return None

    def _fail(self, batch: list[tuple[Running[TaskT], Feed]], error: GammarayError) -> None:
        for running, _ in batch:
            del self._running[running.task.session_id]
            self.engine.release(running.task.session_id)
            self._finish(running, error)

    def _try_advance(self, running: Running[TaskT], logits: Tensor) -> object | None:
        try:
            return self._advance(running, logits)
        except GammarayError as error:
            return error
        except Exception as error:
            _log.exception("session %s failed", running.task.session_id)
            self.engine.release(running.task.session_id)
            return InternalError(f"{type(error).__name__}: {error}")

    def _finish(self, running: Running[TaskT], outcome: object) -> None:
        self._reply(running.task, outcome, running.timing)

    def _reply(self, task: TaskT, outcome: object, timing: Timing | None = None) -> None:
        reply = Reply(task.request_id, task.session_id, outcome, timing or Timing())
        self._replies.append((task, reply))


def _reason_to_drop(task: Task, now: float) -> GammarayError | None:
    if task.cancelled:
        return CancelledError("the stream that asked is gone")
    if now > task.deadline:
        late_ms = int((now - task.arrived) * 1000)
        return DeadlineExceededError(f"no answer within {late_ms} ms")
    return None


def check_width(num_nodes: int, max_batch_tokens: int) -> None:
    """Check that a proposal fits into one forward.

    Raises:
        InvalidArgumentError: It does not.
    """
    if num_nodes >= max_batch_tokens:
        raise InvalidArgumentError(
            "proposal", f"{num_nodes} nodes", f"fewer than max_batch_tokens ({max_batch_tokens})"
        )
