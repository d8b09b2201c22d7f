"""Connection to one worker process: one long-lived stream that carries the blocks of many sessions."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic

import grpc

from gammaray.aio import end_tasks
from gammaray.blocks import MAX_ANSWER_BYTES
from gammaray.errors import DeadlineExceededError, GammarayError, UnavailableError
from gammaray.security.tls import TlsFiles, dial
from gammaray.v1 import types_pb2 as pb
from orchestrator.workers.backoff import AdaptiveTimeout, Backoff
from orchestrator.workers.prefix_affinity import PrefixIndex
from orchestrator.workers.protocol import BlockT, ResultT, WorkerInfo, WorkerProtocol

_log = logging.getLogger(__name__)

INFO_PERIOD_S = 2.0
INFO_TIMEOUT_S = 5.0
MAX_FORGETS = 1024  # queued while the worker is not connected
RECONNECT_BASE_S, RECONNECT_CAP_S = 0.05, 2.0
UNTRIED = "not connected yet"
ANSWER_GRACE_S = 0.25
"""Added to the worker's deadline on our side, so that its own error, which has the reason, arrives first."""

MAX_FRAME_BYTES = 2**20
"""Keeps frames well below gRPC's default receive limit of 4 MiB; a single block may be larger."""

_EOF: Any = vars(grpc.aio)["EOF"]  # the type stubs lack it

CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the timeout of a connection attempt: with less a busy worker is never reached, and a stopped worker
    # accepts the pending attempt as soon as it continues.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # A stopped process or a lost machine is detected after the sum of the two. gRPC itself answers the pings,
    # so a worker in a long computation still answers.
    ("grpc.keepalive_time_ms", 250),
    ("grpc.keepalive_timeout_ms", 500),
    ("grpc.http2.ping_timeout_ms", 500),  # for the answer; 60 s by default
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a broken connection of one link must not delay the next one
)


class WorkerConnection(Generic[BlockT, ResultT]):
    """Connection of this orchestrator to a worker: connects, reconnects and carries calls.

    All calls that become ready in one tick of the event loop are sent in one frame. Answers are matched by
    request id; answers to abandoned calls are dropped. When the stream breaks, all calls fail with
    UnavailableError and the link reconnects with exponential backoff and jitter.

    Args:
        check: Called with the worker's info on connecting and every two seconds; raises GammarayError to
            refuse the worker.
        on_change: Called when the link came up, went down, or the worker was refused.
    """

    def __init__(
        self,
        protocol: WorkerProtocol[BlockT, ResultT],
        address: str,
        *,
        check: Callable[[WorkerInfo], None],
        on_change: Callable[[], None],
        tls: TlsFiles | None = None,
    ) -> None:
        self.address = address
        self.role = protocol.role
        self.info: WorkerInfo | None = None  # last info from the worker
        self.refusal: GammarayError | None = None  # why the worker is refused
        self.trouble = UNTRIED  # why the link is down; empty while it is up
        self.clock_offset_s: float | None = None  # the worker's clock minus this process's
        self.sessions: set[str] = set()  # of this orchestrator
        self.batch_size = 0  # sessions, of all orchestrators, in the last step that answered a block
        self.prefixes = PrefixIndex()  # that the worker has processed
        self.backoff = Backoff()  # pauses the use of a worker that is connected but late
        self.timeout = AdaptiveTimeout()
        self.is_draining = False  # the worker shuts down: it answers calls in flight and takes no new ones
        # What takes the messages about one session that answer no call, by session; None: no more will come.
        self.listeners: dict[str, Callable[[Any], None]] = {}
        self._protocol = protocol
        self._check, self._on_change, self._tls = check, on_change, tls
        self.is_up = False  # whether calls can be made now
        self._ids = itertools.count(1)
        self.pending: dict[int, asyncio.Future[ResultT]] = {}  # unanswered calls, by request id
        self._blocks: list[BlockT] = []
        self._releases: list[pb.ReleaseSession] = []
        self._has_output = asyncio.Event()
        self._failures = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def is_usable(self) -> bool:
        """Whether calls should be made now."""
        return self.is_up and not self.is_draining and self.backoff.ready

    def start(self) -> None:
        """Start connecting, and keep the link up until `close`."""
        self._task = asyncio.create_task(self._stay_connected(), name=f"{self.role} link {self.address}")

    async def close(self) -> None:
        """Close the stream; calls in flight fail with UnavailableError."""
        if self._task is not None:
            await end_tasks(self._task)

    async def call(self, block: BlockT, timeout_s: float) -> ResultT:
        """Send a block and wait up to `timeout_s` and a short grace for its answer; sets its `request_id`."""
        if not self.is_up:
            raise UnavailableError(f"the {self.role} worker at {self.address} is not connected")
        block.request_id = next(self._ids)
        self._blocks.append(block)
        self._has_output.set()
        return await self._answer(block.request_id, asyncio.get_running_loop().create_future(), timeout_s)

    def post(self, block: BlockT) -> asyncio.Future[ResultT]:
        """Send a block and return its answer, for which `wait` waits; sets its `request_id`."""
        block.request_id = next(self._ids)
        answer: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(partial(self._end, block.request_id))
        self.pending[block.request_id] = answer
        self._blocks.append(block)
        self._has_output.set()
        return answer

    def _end(self, request_id: int, answer: asyncio.Future[ResultT]) -> None:
        self.pending.pop(request_id, None)
        if not answer.cancelled():
            answer.exception()  # retrieved, else asyncio logs the error of an unused answer

    async def wait(self, message: asyncio.Future[ResultT], timeout_s: float) -> None:
        """Wait for what the worker sends without another call; fails as `call` does."""
        await self._answer(next(self._ids), message, timeout_s)

    async def _answer(self, request_id: int, future: asyncio.Future[ResultT], timeout_s: float) -> ResultT:
        self.pending[request_id] = future
        loop = asyncio.get_running_loop()
        timer = loop.call_later(timeout_s + ANSWER_GRACE_S, self._expire, request_id, timeout_s)
        try:
            return await future
        finally:
            timer.cancel()
            self.pending.pop(request_id, None)

    def tell(self, block: BlockT) -> None:
        """Send a block that gets no answer; returns at once, and drops the block if the link is down.

        The block is sent one tick later, so that calls with an answer are sent first.
        """
        if self.is_up:
            self._blocks.append(block)
            asyncio.get_running_loop().call_soon(self._has_output.set)

    def release(self, session_id: str, epoch: int = 0, *, forget: bool = False) -> None:
        """Release a session on the worker for this owner's epoch (0: any epoch); see pb.ReleaseSession."""
        self.sessions.discard(session_id)
        if self.is_up or (forget and len(self._releases) < MAX_FORGETS):
            self._releases.append(pb.ReleaseSession(session_id=session_id, epoch=epoch, forget=forget))
            self._has_output.set()

    def _expire(self, request_id: int, timeout_s: float) -> None:
        future = self.pending.get(request_id)
        if future is not None and not future.done():
            message = f"the {self.role} worker at {self.address} gave no answer within {timeout_s:g} s"
            future.set_exception(DeadlineExceededError(message))

    async def _stay_connected(self) -> None:
        while True:
            try:
                await self._connect_once()
            except (GammarayError, grpc.RpcError, asyncio.InvalidStateError, OSError) as error:
                self._lose(error)
            except asyncio.CancelledError:
                self._lose(UnavailableError("the orchestrator closed the link"))
                raise
            except Exception as error:  # such as a message that cannot be parsed, which gRPC returns as None
                _log.exception("%s worker at %s", self.role, self.address)
                self._lose(error)
            delay = min(RECONNECT_CAP_S, RECONNECT_BASE_S * 2 ** min(self._failures, 10))
            self._failures += 1
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))

    async def _connect_once(self) -> None:
        async with dial(self.address, self._tls, CHANNEL_OPTIONS) as channel:
            await self._refresh_info(channel)
            if self.is_draining:
                raise UnavailableError(f"the {self.role} worker at {self.address} is about to stop")
            call = self._protocol.open_stream(channel)
            tasks = [
                asyncio.create_task(work, name=f"{self.role} link {self.address}: {name}")
                for name, work in (
                    ("writer", self._write_frames(call)),
                    ("reader", self._read_frames(call)),
                    ("watch", self._watch(channel)),
                )
            ]
            self.is_up, self.trouble = True, ""
            self.backoff.succeeded()  # a restarted worker, or one that was only delayed
            self._on_change()
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                self.is_up = False
                call.cancel()
                await end_tasks(*tasks)

    async def _write_frames(self, call: Any) -> None:
        while True:
            await self._has_output.wait()
            self._has_output.clear()
            while self._blocks or self._releases:
                await call.write(self._next_frame())

    def _next_frame(self) -> Any:
        releases, self._releases = self._releases, []
        blocks: list[BlockT] = []
        size = 0
        while self._blocks:
            request_id = self._blocks[0].request_id
            future = self.pending.get(request_id)
            if request_id and (future is None or future.done()):  # its caller no longer waits
                del self._blocks[0]
                continue
            size += self._blocks[0].ByteSize()
            if blocks and size > MAX_FRAME_BYTES:
                break
            blocks.append(self._blocks.pop(0))
        return self._protocol.make_frame(blocks, releases)

    async def _read_frames(self, call: Any) -> None:
        while (frame := await call.read()) is not _EOF:
            self._failures = 0
            for result in frame.results:
                future = self.pending.get(result.request_id)
                if future is None:
                    self.backoff.note_late_answer()
                elif not future.done():
                    future.set_result(result)
            for ahead in frame.ahead:
                listener = self.listeners.get(ahead.session_id)
                if listener is not None:
                    listener(ahead)
            if frame.is_draining and not self.is_draining:
                self.is_draining = True
                self._on_change()
        raise UnavailableError(f"the {self.role} worker at {self.address} ended the stream")

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Poll the worker's info, so that calls to a stuck worker fail before their deadline."""
        while True:
            await asyncio.sleep(INFO_PERIOD_S)
            try:
                await self._refresh_info(channel)
            except grpc.RpcError:
                await self._refresh_info(channel)

    async def _refresh_info(self, channel: grpc.aio.Channel) -> None:
        info = await self._protocol.get_info(channel, INFO_TIMEOUT_S)
        self.clock_offset_s = info.clock_s - time.time() if info.clock_s else None
        try:
            self._check(info)
        except GammarayError as error:
            if str(error) != str(self.refusal):
                _log.error("%s worker at %s is refused: %s", self.role, self.address, error)
            self.info, self.refusal = info, error
            raise
        self.info, self.refusal = info, None
        self.is_draining = info.is_draining

    def _lose(self, error: Exception) -> None:
        """Fail all calls in flight; the worker may still have processed them, but blocks are idempotent."""
        reason = _reason(error)
        level = logging.WARNING if self.trouble in ("", UNTRIED) else logging.INFO  # once for each break
        _log.log(level, "%s worker at %s: %s", self.role, self.address, reason)
        self.trouble = reason
        self._blocks.clear()
        self._releases = [release for release in self._releases if release.forget]
        self.prefixes.clear()  # it may have restarted when it reconnects
        for future in self.pending.values():
            if not future.done():
                message = f"the link to the {self.role} worker at {self.address} broke: {reason}"
                future.set_exception(UnavailableError(message))
        for listener in list(self.listeners.values()):
            listener(None)
        self._on_change()


def _reason(error: Exception) -> str:
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error) or type(error).__name__
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {INFO_TIMEOUT_S:g} s"
    return str(error.details() or error.code().name)
