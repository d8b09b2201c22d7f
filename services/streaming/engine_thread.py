"""The thread that owns an engine: it drains a queue, steps, and passes replies to the event loop.

The queue blocks, so an idle worker uses no CPU, and a busy one takes all queued commands when a step starts.
The replies of a step are passed in one call; a step never waits for a client.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gammaray.errors import InternalError, UnavailableError
from services.engine.core.device import raise_if_lost
from services.engine.core.errors import EngineLostError
from services.scheduling.scheduler import Scheduler
from services.scheduling.tasks import Release, Reply, Task

MAX_DELIVERY_S = 1e-3
"""How long draft-ahead waits for the event loop to send the replies."""

STUCK_AFTER_S = 5.0
"""How long a step may go on after its engine was lost, to end by itself and answer its blocks."""

_log = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[Scheduler[Any]], None]


class EngineThread:
    """Runs a scheduler in its own thread; every method is called from the event loop.

    `load` builds the scheduler, and loads its model, in the thread; `ended` is set when the thread ends,
    stopped or because the engine is lost.
    """

    def __init__(self, load: Callable[[], Scheduler[Any]], name: str) -> None:
        self._load = load
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loaded: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.scheduler: Scheduler[Any] | None = None
        self._is_delivered = threading.Event()
        self._step_began: float | None = None
        self._lost_since: float | None = None
        self.ended = asyncio.Event()

    async def start(self) -> None:
        """Start the thread and wait until the model is loaded; raises any error of loading."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await asyncio.wrap_future(self._loaded)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue blocks; each is answered through its `deliver`."""
        if self.scheduler is not None:
            self.scheduler.queue.preempt(tasks)
        self._inbox.put(lambda scheduler: scheduler.submit(tasks))

    def check(self) -> None:
        """Check the engine between two steps; the thread ends if the engine is lost."""
        self._inbox.put(lambda scheduler: scheduler.check())

    def why_stuck(self) -> str:
        """Return why the engine is lost in a step that does not end by itself; empty while it is not.

        Such a step may wait for a process of the engine that has ended.
        """
        scheduler, began, now = self.scheduler, self._step_began, time.monotonic()
        if scheduler is None or began is None:
            return ""
        limit = scheduler.step_timeout_s
        if limit is not None and now - began > limit + STUCK_AFTER_S:
            return f"a step has taken more than {limit:g} s"
        try:
            scheduler.check()
        except EngineLostError as error:
            self._lost_since = now if self._lost_since is None else self._lost_since
            return str(error) if now - self._lost_since > STUCK_AFTER_S else ""
        return ""

    def release(self, endings: Sequence[Release]) -> None:
        """End sessions, see `Scheduler.release`."""
        self._inbox.put(lambda scheduler: scheduler.release(endings))

    async def call(self, function: Callable[[Scheduler[Any]], T]) -> T:
        """Run `function` between two steps and return its result; UnavailableError if the thread ended."""
        if not self.is_alive:
            raise UnavailableError("the engine has stopped")
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def command(scheduler: Scheduler[Any]) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(scheduler))
                except Exception as error:
                    future.set_exception(error)

        self._inbox.put(command)
        return await asyncio.wrap_future(future)

    def look(self, function: Callable[[Scheduler[Any]], T]) -> T:
        """Return the result of `function`, which any thread may call, also during a step."""
        if not self.is_alive or self.scheduler is None:
            raise UnavailableError("the engine has stopped")
        return function(self.scheduler)

    async def stop(self, timeout_s: float) -> bool:
        """End the thread after its current step; return whether it ended in time."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self.is_alive

    def _run(self) -> None:
        try:
            scheduler = self._load()
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        self.scheduler = scheduler
        self._loaded.set_result(None)
        try:
            self._serve(scheduler)
        except EngineLostError as error:
            _log.error("%s; its sessions must move to other workers", error)
            self._answer_all(scheduler, error)
        finally:
            self._tell(self.ended.set)
            scheduler.close()

    def _answer_all(self, scheduler: Scheduler[Any], error: EngineLostError) -> None:
        try:
            scheduler.fail_all(error)
            self._hand_over(scheduler.step())
        except Exception:  # the caches are on the device that is lost
            _log.exception("the blocks that waited are not answered")

    def _serve(self, scheduler: Scheduler[Any]) -> None:
        while self._drain(scheduler):
            self._step_began = time.monotonic()
            try:
                replies = scheduler.step()
            except EngineLostError:
                raise
            except Exception as error:
                raise_if_lost(error)
                _log.exception("a step failed; all caches are dropped")
                scheduler.fail_all(InternalError(f"a step failed: {type(error).__name__}: {error}"))
                continue
            finally:
                self._step_began = None
            if replies and not self._hand_over(replies):
                return
            if replies and scheduler.queue.is_idle and scheduler.has_work and self._inbox.empty():
                # Otherwise a step would take the GIL before the event loop has sent the replies.
                self._is_delivered.wait(MAX_DELIVERY_S)

    def _drain(self, scheduler: Scheduler[Any]) -> bool:
        """Run all queued commands, waiting for one when there is no work; return False at the end."""
        try:
            command = self._inbox.get(block=not scheduler.has_work)
            while command is not None:
                command(scheduler)
                command = self._inbox.get_nowait()
            return False
        except queue.Empty:
            return True

    def _hand_over(self, replies: list[tuple[Task, Reply]]) -> bool:
        self._is_delivered.clear()
        return self._tell(self._deliver, replies)

    def _deliver(self, replies: list[tuple[Task, Reply]]) -> None:
        for task, reply in replies:
            task.deliver(task, reply)
        assert self._loop is not None
        self._loop.call_soon(self._is_delivered.set)  # after the streams that these replies wake

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> bool:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # The loop is closed: there are no streams left to answer.
            return False
        return True
