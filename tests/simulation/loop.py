"""An event loop with a virtual clock that runs the callbacks of several simulated processes.

Callbacks of one process run in the order in which they became ready, as asyncio promises. Which process
runs next is drawn from a seed. A process that is paused keeps its callbacks; one that is killed runs none any
more, not even `finally` blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import itertools
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

HANDLE_S = 1e-6
"""Virtual seconds that each callback takes, so that no loop of callbacks stops the clock."""

THREAD_S = 2e-3
"""Most virtual seconds that work in a thread takes."""

START_S = 1e6
"""The clock's first value."""

COLLECT_EVERY = 200
"""Simulations between two garbage collections, each leaves 0.1 MB; none runs during one, as its moment would
depend on others."""

_num_runs = itertools.count()
Callback = Callable[..., Any]


class Process:
    """A simulated process, with its callbacks that may run, its tasks, and the context of both."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive, self.is_paused = True, False
        self.ready: deque[Call] = deque()
        self.tasks: WeakSet[SimulatedTask] = WeakSet()
        self.context = copy_context()
        self.context.run(_process.set, self)

    def __repr__(self) -> str:
        return self.name


_process: ContextVar[Process] = ContextVar("process")


OUTSIDE = Process("outside")
"""Process of callbacks that garbage collection schedules outside of any process; they are not run."""
OUTSIDE.is_alive = False


def current_process() -> Process:
    return _process.get()


class Call:
    """A callback; has the methods of `asyncio.Handle` and `asyncio.TimerHandle` that callers use."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "process", "when_s")

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context, when_s: float = 0.0
    ) -> None:
        self.callback, self.args, self.context, self.when_s = callback, args, context, when_s
        self.process = context.get(_process) or OUTSIDE
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.when_s


class SimulatedTask(asyncio.Task):
    """A task whose place in sets does not depend on its address, so that a seed gives one schedule."""

    def __init__(self, coro: Any, *, loop: SimulatedLoop, context: Context | None, name: str | None) -> None:
        self.number = next(loop.task_numbers)
        self.process = current_process() if context is None else context[_process]
        self.process.tasks.add(self)
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


class Stuck(AssertionError):
    """Nothing can happen any more, or too much has happened."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """See the module's docstring.

    Args:
        rng: Draws which process runs, and how long things take.
        max_steps: Callbacks after which the run counts as one that does not end.

    Attributes:
        now: The virtual time, in seconds.
        current: The process whose callback runs, or ran last.
        steps: Number of callbacks that have run.
        at_step: Called before the callback of that number; set by `when_step`.
        dial: Serves `create_connection`.
        errors: Exceptions of callbacks and of tasks that no one awaited.
        task_numbers: Numbers of the tasks.
        graveyard: Tasks of killed processes: while they exist their `finally` blocks do not run.
    """

    def __init__(self, rng: random.Random, max_steps: int = 400_000) -> None:
        self.rng, self.now, self.steps, self.max_steps = rng, START_S, 0, max_steps
        self.processes: list[Process] = []
        self.harness = self.current = self.process("harness")
        self.dial: Callable[..., Coroutine[Any, Any, Any]] | None = None
        self.errors: list[str] = []
        self.graveyard: list[Any] = []
        self.task_numbers = itertools.count()
        self.is_over = False
        self._timers: list[tuple[float, int, Call]] = []
        self._numbers = itertools.count()
        self._at_steps: list[tuple[int, int, Callable[[], None]]] = []
        self._ticks = 0
        self._runnable: list[Process] = []  # those with callbacks that are not paused

    def process(self, name: str) -> Process:
        """Start a process, whose first task `create_task` makes in its context."""
        process = Process(name)
        self.processes.append(process)
        return process

    def kill(self, process: Process) -> None:
        """End a process at once, as SIGKILL does."""
        process.is_alive = False
        process.ready.clear()
        self.processes.remove(process)
        if process in self._runnable:
            self._runnable.remove(process)
        self.graveyard += process.tasks

    def pause(self, process: Process, *, is_paused: bool) -> None:
        """Stop a process, as SIGSTOP does, or let it go on."""
        process.is_paused = is_paused
        if is_paused and process in self._runnable:
            self._runnable.remove(process)
        elif not is_paused and process.is_alive and process.ready:
            self._runnable.append(process)

    def _add(self, call: Call) -> None:
        process = call.process
        if process.is_alive:
            if not process.ready and not process.is_paused:
                self._runnable.append(process)
            process.ready.append(call)

    def when_step(self, step: int, action: Callable[[], None]) -> None:
        """Call `action` just before the callback of that number."""
        heapq.heappush(self._at_steps, (step, next(self._numbers), action))

    def time(self) -> float:
        return self.now

    def read_clock(self) -> float:
        """Return the time; no two readings are the same."""
        self._ticks += 1
        return self.now + self._ticks * 1e-9

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        call = Call(callback, args, copy_context() if context is None else context)
        self._add(call)
        return call

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callback, *args: Any, context: Context | None = None) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callback, *args: Any, context: Context | None = None) -> Any:
        call = Call(callback, args, copy_context() if context is None else context, when)
        heapq.heappush(self._timers, (when, next(self._numbers), call))
        return call

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        return SimulatedTask(coro, loop=self, name=name, context=context)

    def run_in_executor(self, _: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run `func` on this thread, some time from now."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self.rng.uniform(0.0, THREAD_S), run)
        return future

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        assert self.dial is not None
        return await self.dial(factory, f"{host}:{port}")

    def finish_generator(self, generator: Any) -> None:
        """Close an asynchronous generator that is dropped before its end, as asyncio's loops do."""
        if not self.is_over and self.current.is_alive:
            self.create_task(generator.aclose(), context=self.current.context)

    get_debug = staticmethod(bool)
    """Returns False; each future asks, and this is no call of Python code."""

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.is_over or "was destroyed but it is pending" in context["message"]:
            return
        self.errors.append(f"{context['message']}: {context.get('exception')!r}")

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run `main` in the harness to its end; return its result."""
        task = self.create_task(main, context=self.harness.context)
        while not task.done():
            self.step()
        return task.result()

    def step(self) -> None:
        """Run one callback, after moving the clock to it if none is ready."""
        while self._at_steps and self._at_steps[0][0] <= self.steps:
            self.harness.context.run(heapq.heappop(self._at_steps)[2])
        runnable, timers = self._runnable, self._timers
        if not runnable and timers:
            self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            call = heapq.heappop(timers)[2]
            if not call.is_cancelled:
                self._add(call)
        if not runnable:
            if not timers:
                raise Stuck("nothing is left to run")
            return
        process = runnable[int(self.rng.random() * len(runnable)) if len(runnable) > 1 else 0]
        self.current = process
        call = process.ready.popleft()
        if not process.ready:
            runnable.remove(process)
        if call.is_cancelled:
            return
        self.steps += 1
        self.now += HANDLE_S
        if self.steps > self.max_steps:
            raise Stuck(f"{self.steps} callbacks in {self.now - START_S:.1f} s, last {call.callback}")
        try:
            call.context.run(call.callback, *call.args)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self.errors.append(f"{call.callback} of {process}: {error!r}")


@contextlib.contextmanager
def simulated(seed: int) -> Iterator[SimulatedLoop]:
    """Give this thread a simulated loop, and the whole process its clock and its randomness."""
    rng = random.Random(seed)
    loop = SimulatedLoop(rng)
    common = random.Random(rng.getrandbits(64))

    class Seeded(random.Random):
        def __init__(self, x: Any = None) -> None:
            super().__init__(common.getrandbits(64) if x is None else x)

    epoch = 1_800_000_000.0 - START_S
    clocks: dict[str, Any] = {
        "monotonic": lambda: loop.now,
        "perf_counter": loop.read_clock,
        "perf_counter_ns": lambda: int(loop.read_clock() * 1e9),
        "time": lambda: epoch + loop.now,
        "time_ns": lambda: int((epoch + loop.now) * 1e9),
    }
    random.seed(rng.getrandbits(64))
    with contextlib.ExitStack() as patched:
        for name, clock in clocks.items():
            patched.enter_context(patch.object(time, name, clock))
        patched.enter_context(patch.object(os, "urandom", common.randbytes))
        patched.enter_context(patch.object(random, "Random", Seeded))
        asyncio.events._set_running_loop(loop)  # noqa: SLF001  # what asyncio's own loops call
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=loop.finish_generator)
        gc.disable()
        try:
            yield loop
        finally:
            loop.is_over = True
            _clear(loop)
            if next(_num_runs) % COLLECT_EVERY == 0:
                gc.collect()
            sys.set_asyncgen_hooks(*hooks)
            asyncio.events._set_running_loop(None)  # noqa: SLF001
            gc.enable()


def _clear(loop: SimulatedLoop) -> None:
    tasks = loop.graveyard
    for process in loop.processes:
        process.is_alive = False
        process.ready.clear()
        tasks += process.tasks
    for task in tasks:
        # What it awaits, raises or starts in a `finally` no longer matters.
        with contextlib.suppress(BaseException):
            loop.harness.context.run(task.get_coro().close)
    tasks.clear()
