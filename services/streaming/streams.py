"""One bidirectional stream of blocks: reads frames, bounds the blocks in flight, gathers replies into frames.

When a stream ends, its pending blocks are dropped. Its sessions are kept until they are released or evicted
as least recently used, so that an orchestrator that reconnects finds its caches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from opentelemetry.trace import Tracer

from gammaray.errors import GammarayError, InternalError, ResourceExhaustedError, UnavailableError
from services.scheduling.tasks import AheadWork, Release, Reply, Task
from services.streaming.engine_thread import EngineThread
from services.streaming.submission import Submission
from services.streaming.tracing import record_ahead, record_answer

MAX_IN_FLIGHT = 4096
"""Blocks of one stream that wait or run; more are refused, so that a client cannot exhaust the memory."""

MAX_IDS_IN_FLIGHT = 4 << 20
"""Token ids in the waiting and running blocks of all streams, about 150 MB of Python integers."""

MAX_FRAME_BLOCKS = 16_384
"""Bound of the blocks, and of the releases, of one frame; the stream of a client that sends more is ended."""

NOTICE_S = 0.2
"""How long blocks are still accepted after the draining notice, for those already on their way."""

Deliver = Callable[[Task, Reply], None]

_log = logging.getLogger(__name__)


class Streams:
    """The open streams of a worker.

    Attributes:
        is_leaving: Whether clients are notified to use other workers.
        is_draining: Whether new blocks are refused.
        submission: Where the blocks of all streams are submitted.
        num_ids: Token ids in the blocks that wait or run.
        open_streams: The streams that are being served.
    """

    def __init__(self, engine: EngineThread, tracer: Tracer | None = None) -> None:
        self.submission, self.tracer = Submission(engine), tracer
        self.engine = engine
        self.is_leaving = self.is_draining = False
        self.num_ids = 0
        self.open_streams: set[BlockStream] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    async def serve(
        self, requests: AsyncIterator[Any], parse: Callable[[Any, Deliver], Task]
    ) -> AsyncGenerator[list[Reply], None]:
        """Serve one stream; yields all replies that are ready, in lists.

        `parse` turns a block of a client's frame into a validated task. A frame with more than
        MAX_FRAME_BLOCKS blocks or releases is refused, and so is a stream that comes after the notice.
        """
        if self.is_leaving:
            raise UnavailableError("the worker is shutting down")
        stream = BlockStream(self, parse)
        self.open_streams.add(stream)
        self._empty.clear()
        try:
            async with aclosing(stream.run(requests)) as frames:
                async for replies in frames:
                    yield replies
        finally:
            stream.close()
            self.open_streams.discard(stream)
            if not self.open_streams:
                self._empty.set()

    async def drain(self, timeout_s: float) -> bool:
        """Notify clients, finish their blocks; return whether all streams ended in time.

        Blocks are accepted for NOTICE_S after the notice, since they may be on their way, and then refused.
        """
        deadline = time.monotonic() + timeout_s
        self.is_leaving = True
        self._wake_all()
        if self.open_streams:
            await asyncio.sleep(min(NOTICE_S, timeout_s))
        self.is_draining = True
        self._wake_all()
        try:
            await asyncio.wait_for(self._empty.wait(), max(0.0, deadline - time.monotonic()))
        except asyncio.TimeoutError:
            return False
        return True

    def _wake_all(self) -> None:
        for stream in self.open_streams:
            stream.ready.set()


class BlockStream:
    """One stream; all methods run in the event loop. `ready` makes `run` check again."""

    def __init__(self, streams: Streams, parse: Callable[[Any, Deliver], Task]) -> None:
        self._streams, self._parse = streams, parse
        self._pending: set[Task] = set()
        self._outbox: list[Reply] = []
        self.ready, self._written = asyncio.Event(), asyncio.Event()
        self._is_read = self._is_announced = False
        self._failure: GammarayError | None = None

    def close(self) -> None:
        """Drop the pending blocks: their replies cannot be sent."""
        for task in self._pending:
            task.cancelled = True

    async def run(self, requests: AsyncIterator[Any]) -> AsyncGenerator[list[Reply], None]:
        """Yield replies until the client ends the stream, or the worker drains, and all blocks are answered.

        A list without replies is the notice that the worker is shutting down.
        """
        reader = asyncio.create_task(self._read(requests))
        try:
            while not self._is_finished():
                await self.ready.wait()
                self.ready.clear()
                replies, self._outbox = self._outbox, []
                must_announce = self._streams.is_leaving and not self._is_announced
                if replies or must_announce:
                    self._is_announced = self._streams.is_leaving
                    yield replies
                    self._written.set()
            if self._failure is not None:
                raise self._failure
        finally:
            reader.cancel()

    def _is_finished(self) -> bool:
        if self._failure is not None:
            return True
        is_last = self._is_read or self._streams.is_draining
        return is_last and not self._pending and not self._outbox

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        try:
            async for frame in requests:
                # Backpressure: stop reading from a client that does not read its replies.
                while len(self._outbox) > MAX_IN_FLIGHT:
                    self._written.clear()
                    await self._written.wait()
                if len(frame.blocks) > MAX_FRAME_BLOCKS or len(frame.releases) > MAX_FRAME_BLOCKS:
                    got = f"{len(frame.blocks)} blocks and {len(frame.releases)} releases"
                    self._failure = ResourceExhaustedError(f"frame: got {got}, allowed: {MAX_FRAME_BLOCKS}")
                    return
                self._take(frame)
        finally:
            self._is_read = True
            self.ready.set()

    def _take(self, frame: Any) -> None:
        if frame.releases:
            endings = [Release(r.session_id, r.epoch, r.forget) for r in frame.releases]
            self._streams.submission.release(endings)
        self._streams.submission.submit(list(self._parse_all(frame.blocks)))

    def _parse_all(self, blocks: Iterable[Any]) -> Iterable[Task]:
        for block in blocks:
            try:
                if self._streams.is_draining:
                    raise UnavailableError("the worker is shutting down")
                if len(self._pending) >= MAX_IN_FLIGHT:
                    got = f"more than {MAX_IN_FLIGHT} on one stream"
                    raise ResourceExhaustedError(f"blocks in flight: got {got}")
                task = self._parse(block, self._deliver)
                if self._streams.num_ids > 0 and self._streams.num_ids + task.num_ids > MAX_IDS_IN_FLIGHT:
                    got = f"more than {MAX_IDS_IN_FLIGHT} on all streams"
                    raise ResourceExhaustedError(f"token ids in flight: got {got}")
            except GammarayError as error:
                self._refuse(block, error)
            except Exception as error:
                _log.exception("failed to parse a block of session %r", block.session_id[:128])
                self._refuse(block, InternalError(f"{type(error).__name__}: {error}"))
            else:
                self._pending.add(task)
                self._streams.num_ids += task.num_ids
                yield task

    def _refuse(self, block: Any, error: GammarayError) -> None:
        self._outbox.append(Reply(block.request_id, block.session_id, error))
        self.ready.set()

    def _deliver(self, task: Task, reply: Reply) -> None:
        if isinstance(reply.outcome, AheadWork):
            if self._streams.tracer is not None:
                record_ahead(self._streams.tracer, task, reply.outcome)
            return
        if reply.outcome is not None:
            self._outbox.append(reply)
        self.ready.set()
        if task not in self._pending:  # a further reply to a task that was already answered
            return
        self._pending.discard(task)
        self._streams.num_ids -= task.num_ids
        if task.traceparent and self._streams.tracer is not None:
            record_answer(self._streams.tracer, task, reply)
