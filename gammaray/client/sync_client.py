"""The blocking client: AsyncClient on an event loop that runs in a thread of its own."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from gammaray.client.async_client import AsyncClient
from gammaray.types import Chunk

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

_THREAD = "gammaray-client"

_WAKE_S = 0.5
"""How often a waiting call wakes, in seconds. If another thread receives SIGINT, the main thread raises
KeyboardInterrupt only when it runs again."""


class _LoopThread:
    """Runs the event loop of every blocking client of this process.

    grpc.aio delivers the events of all loops through one queue, so events of a closed loop raise errors in
    the others (github.com/grpc/grpc, issue 25364). One loop that is never closed serves all clients.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        os.register_at_fork(after_in_child=self._forget)

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop; the first call starts its thread, which does not keep the process alive."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_default_executor(ThreadPoolExecutor(thread_name_prefix=_THREAD))
                threading.Thread(target=self._loop.run_forever, name=_THREAD, daemon=True).start()
            return self._loop

    def _forget(self) -> None:
        self._lock, self._loop = threading.Lock(), None  # the thread stays in the parent


_LOOP_THREAD = _LoopThread()


def _with_arguments_of(
    kind: Callable[_P, AsyncClient],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Client, _P], None]]:
    """Return a decorator of Client's constructor, which passes all arguments on."""
    return functools.wraps(AsyncClient.__init__)


def _blocking(
    method: Callable[Concatenate[AsyncClient, _P], Coroutine[Any, Any, _Result]],
) -> Callable[Concatenate[Client, _P], _Result]:
    """Return the method of Client that runs a method of AsyncClient to its end."""

    @functools.wraps(method)
    def call(self: Client, /, *args: _P.args, **options: _P.kwargs) -> _Result:
        return self._run(method(self._client, *args, **options))

    return call


def _streaming(
    method: Callable[Concatenate[AsyncClient, _P], AsyncGenerator[Chunk, None]],
) -> Callable[Concatenate[Client, _P], Iterator[Chunk]]:
    """Return the method of Client that yields the chunks of a method of AsyncClient."""

    @functools.wraps(method)
    def call(self: Client, /, *args: _P.args, **options: _P.kwargs) -> Iterator[Chunk]:
        return self._iterate(method(self._client, *args, **options))

    return call


class Client:
    """AsyncClient without `async` and `await`; same arguments, same errors. Thread-safe.

    Can be used inside a running event loop, which it blocks while waiting.
    """

    @_with_arguments_of(AsyncClient)
    def __init__(self, *args: Any, **options: Any) -> None:
        self._client = AsyncClient(*args, **options)
        self._loop, self._is_closed = _LOOP_THREAD.loop(), False

    generate = _streaming(AsyncClient.generate)
    complete = _blocking(AsyncClient.complete)
    resume = _streaming(AsyncClient.resume)
    get_session = _blocking(AsyncClient.get_session)
    session_trace = _blocking(AsyncClient.session_trace)
    list_sessions = _blocking(AsyncClient.list_sessions)
    cancel = _blocking(AsyncClient.cancel)
    delete_session = _blocking(AsyncClient.delete_session)
    status = _blocking(AsyncClient.status)
    wait_ready = _blocking(AsyncClient.wait_ready)

    def close(self) -> None:
        """Close the connection; completions in flight are cancelled."""
        if self._is_closed:
            return
        self._run(self._client.close())
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _iterate(self, chunks: AsyncGenerator[Chunk, None]) -> Iterator[Chunk]:
        running: asyncio.Task[Any] | None = None

        async def step() -> Chunk | None:
            nonlocal running
            running = asyncio.current_task()
            return await anext(chunks, None)

        async def close() -> None:
            # After Ctrl-C a step may still be running or unwinding; only a suspended generator can be closed.
            if running is not None and not running.done():
                running.cancel()
                await asyncio.wait([running])
            await chunks.aclose()

        try:
            while (chunk := self._run(step())) is not None:
                yield chunk
        finally:
            if not self._is_closed:
                self._run(close())

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        if self._is_closed:
            work.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while True:
                try:
                    return future.result(_WAKE_S)
                except FutureTimeoutError:
                    if future.done():  # by now, or with a TimeoutError of its own
                        return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C while waiting; no effect if the coroutine itself failed
            raise
