"""Holds a session's blocks until its grammar is compiled, and submits them to the engine in order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

from gammaray.errors import CancelledError, GammarayError, InternalError
from services.scheduling.tasks import Release, Reply, Task
from services.streaming.engine_thread import EngineThread

MAX_COMPILING = 2
"""Grammars that are compiled at once, each at most once: the engine needs the cores, too, and the choices of
one request, which have the same grammar, must not delay the sessions of others."""

_log = logging.getLogger(__name__)


class Submission:
    """Submits blocks and releases to the engine in each session's order; grammars are compiled on the way.

    A grammar is compiled in a thread of its own, so that neither the event loop nor the engine waits for it.
    All methods run in the event loop.
    """

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._waiting: dict[str, deque[Task]] = {}  # blocks of sessions whose grammar is compiled
        self._compiling: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(MAX_COMPILING)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def submit(self, tasks: Iterable[Task]) -> None:
        """Submit blocks; each is answered through its `deliver`, also when its grammar is wrong."""
        ready = []
        for task in tasks:
            waiting = self._waiting.get(task.session_id)
            if waiting is not None:
                waiting.append(task)
            elif self._must_compile(task):
                self._waiting[task.session_id] = deque([task])
                work = asyncio.create_task(self._pass_on(task.session_id))
                self._compiling.add(work)
                work.add_done_callback(self._compiling.discard)
            else:
                ready.append(task)
        if ready:
            self._engine.submit(ready)

    def release(self, endings: Sequence[Release]) -> None:
        """End sessions, and answer their waiting blocks, see `Scheduler.release`."""
        for session_id, epoch, _ in endings:
            waiting = self._waiting.get(session_id)
            if waiting and (epoch == 0 or epoch >= max(task.epoch for task in waiting)):
                error = CancelledError(f"session {session_id} was released")
                for task in waiting:
                    task.deliver(task, Reply(task.request_id, session_id, error))
                waiting.clear()
        self._engine.release(endings)

    def _must_compile(self, task: Task) -> bool:
        scheduler = self._engine.scheduler
        has_grammar = task.spec is not None and task.spec.params.grammar != ""
        return has_grammar and scheduler is not None and scheduler.queue.grammars is not None

    async def _pass_on(self, session_id: str) -> None:
        """Submit the waiting blocks of a session, each as soon as its grammar is compiled."""
        waiting = self._waiting[session_id]
        while waiting:
            task = waiting[0]
            error = await self._compile(task) if self._must_compile(task) else None
            if not waiting or waiting[0] is not task:  # released in the meantime
                continue
            waiting.popleft()
            if error is None:
                self._engine.submit([task])
            else:
                task.deliver(task, Reply(task.request_id, session_id, error))
        del self._waiting[session_id]

    async def _compile(self, task: Task) -> GammarayError | None:
        """Compile a block's grammar, unless it is answered or the engine will drop it; return its error."""
        scheduler, spec = self._engine.scheduler, task.spec
        assert scheduler is not None
        assert scheduler.queue.grammars is not None
        assert spec is not None
        begin, grammar = scheduler.queue.grammars.begin, spec.params.grammar
        turn = self._turns.setdefault(grammar, asyncio.Lock())
        try:
            async with turn, self._places:
                waiting = self._waiting[task.session_id]
                is_first = len(waiting) > 0 and waiting[0] is task  # else it was released
                if is_first and not task.cancelled and time.monotonic() <= task.deadline:
                    task.grammar = await asyncio.to_thread(begin, grammar, spec.eos_token_ids)
        except GammarayError as error:
            return error
        except Exception as error:
            _log.exception("failed to compile the grammar of session %r", task.session_id[:128])
            return InternalError(f"{type(error).__name__}: {error}")
        return None
