"""The blocking client: AsyncClient on an event loop that runs in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from gammaray.client.async_client import STATUS_TIMEOUT_S, AsyncClient
from gammaray.client.completion import Completion
from gammaray.client.request import Prompt
from gammaray.client.transport import RetryPolicy
from gammaray.types import Chunk, EmittedToken, ProcessStatus
from gammaray.wire.cycles import CycleRecord
from gammaray.wire.sessions import SessionInfo

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from gammaray.client.request import GenerateOptions

__all__ = ["Client"]

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


class Client:
    """AsyncClient without `async` and `await`; same arguments, same errors. Thread-safe.

    Can be used inside a running event loop, which it blocks while waiting.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:9000",
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        retry: RetryPolicy | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        tls: bool | None = None,
        ca_file: str | Path | None = None,
        cert_file: str | Path | None = None,
        key_file: str | Path | None = None,
    ) -> None:
        self._client = AsyncClient(
            address,
            api_key=api_key,
            timeout_s=timeout_s,
            retry=retry,
            credentials=credentials,
            tls=tls,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
        )
        self._loop, self._is_closed = _LOOP_THREAD.loop(), False

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[Chunk]:
        """Stream one completion, see `AsyncClient.generate`; leaving the loop cancels it on the server."""
        return self._iterate(self._client.generate(prompt, timeout_s=timeout_s, **options))

    def complete(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Return a finished completion, see `AsyncClient.complete`."""
        return self._run(self._client.complete(prompt, timeout_s=timeout_s, **options))

    def resume(
        self, session_id: str, *, turn: int = 0, offset: int = 0, timeout_s: float | None = None
    ) -> Iterator[Chunk]:
        """Stream the rest of a session's turn, see `AsyncClient.resume`."""
        return self._iterate(self._client.resume(session_id, turn=turn, offset=offset, timeout_s=timeout_s))

    def get_session(
        self, session_id: str, *, timeout_s: float = STATUS_TIMEOUT_S
    ) -> tuple[SessionInfo, tuple[EmittedToken, ...]]:
        """Return a session and its tokens, see `AsyncClient.get_session`."""
        return self._run(self._client.get_session(session_id, timeout_s=timeout_s))

    def session_trace(self, session_id: str, *, timeout_s: float = STATUS_TIMEOUT_S) -> list[CycleRecord]:
        """Return the cycle records of a session, see `AsyncClient.session_trace`."""
        return self._run(self._client.session_trace(session_id, timeout_s=timeout_s))

    def list_sessions(self, limit: int = 100, *, timeout_s: float = STATUS_TIMEOUT_S) -> list[SessionInfo]:
        """Return sessions, see `AsyncClient.list_sessions`."""
        return self._run(self._client.list_sessions(limit, timeout_s=timeout_s))

    def cancel(self, session_id: str, *, timeout_s: float = STATUS_TIMEOUT_S) -> SessionInfo:
        """End a session's current turn permanently, see `AsyncClient.cancel`."""
        return self._run(self._client.cancel(session_id, timeout_s=timeout_s))

    def delete_session(self, session_id: str, *, timeout_s: float = STATUS_TIMEOUT_S) -> bool:
        """End and delete a session, see `AsyncClient.delete_session`."""
        return self._run(self._client.delete_session(session_id, timeout_s=timeout_s))

    def status(self, *, timeout_s: float = STATUS_TIMEOUT_S) -> list[ProcessStatus]:
        """Return the processes of the cluster, see `AsyncClient.status`."""
        return self._run(self._client.status(timeout_s=timeout_s))

    def wait_ready(
        self, timeout_s: float = 60.0, *, roles: Collection[str] = ("target",)
    ) -> list[ProcessStatus]:
        """Wait until each of `roles` has a healthy process, see `AsyncClient.wait_ready`."""
        return self._run(self._client.wait_ready(timeout_s, roles=roles))

    def close(self) -> None:
        """Close the connection; completions in flight are cancelled."""
        if self._is_closed:
            return
        self._run(self._client.close())
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
