"""Resumption of streams: a completion continues after its last token when its call breaks.

The server stores tokens under the session id before it sends them. A call that ends before the completion is
therefore repeated from the next token; the orchestrator that receives it takes over the session. A completion
that is not stored is repeated only while it has no token.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import grpc

from gammaray.aio import num_cancellations
from gammaray.client.transport import Transport
from gammaray.errors import (
    CancelledError,
    DeadlineExceededError,
    GammarayError,
    InternalError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gammaray.types import Chunk, GenerationRequest
from gammaray.wire import convert
from gammaray.wire.rpc_errors import code_of, is_from_gammaray

FIRST_PAUSE_S = 0.02
"""Upper bound of the delay before the first attempt to resume a broken stream, in seconds: short, as usually
only one of several processes died. Later delays follow `RetryPolicy`."""


async def stream_completion(
    transport: Transport, request: GenerationRequest, timeout_s: float | None
) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of a completion; closing the generator ends the call.

    A stored request without a session id gets one. A `timeout_s` of None is the transport's. UnavailableError
    if the call of a completion that is not stored broke after its first token; else the GammarayError of a
    permanent failure, or of one that outlasted the retries, see `RetryPolicy`.
    """
    if request.store:
        request = replace(request, session_id=request.session_id or uuid.uuid4().hex)
    has_started = request.resume_from is not None  # maybe in another process
    budget = _RetryBudget(transport, transport.deadline(timeout_s), has_started)
    offset = request.resume_from or 0
    while True:
        asked_to_end = num_cancellations()
        try:
            message = convert.request_to_proto(request)
            async with aclosing(transport.attempt("Generate", message, budget.deadline)) as messages:
                async for piece in messages:
                    chunk = convert.chunk_from_proto(piece)
                    if chunk.offset != offset:
                        raise _BrokenServerError(
                            f"the server continued at token {chunk.offset}, not {offset}"
                        )
                    offset += len(chunk.tokens)
                    budget.progressed()
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
            # A proxy may lose the status of a stream, including that of a rejected request.
            raise InternalError("the server ended the stream without a finish reason")
        except GammarayError as error:
            if num_cancellations() > asked_to_end:
                raise asyncio.CancelledError from error
            pause_s = budget.pause_s(error)
            if not request.store and offset > 0:
                lost = f"the stream broke after {offset} tokens; it is not stored and cannot be resumed"
                raise UnavailableError(f"{lost}: {error}") from error
        await transport.pause(pause_s)
        if request.store:
            request = replace(request, resume_from=offset)


class _BrokenServerError(InternalError):
    """The server violates the protocol; not retried, since a retry would fail too."""


class _RetryBudget:
    """Retry budget of a completion up to a deadline, as `time.monotonic()`."""

    def __init__(self, transport: Transport, deadline: float, has_started: bool) -> None:
        self.deadline = deadline
        self._transport, self._policy = transport, transport.retry
        self._since, self._failures, self._internal = time.monotonic(), 0, 0
        self._has_started = has_started

    def progressed(self) -> None:
        """Reset the budget: a chunk has arrived."""
        self._since, self._failures, self._internal = time.monotonic(), 0, 0
        self._has_started = True

    def pause_s(self, error: GammarayError) -> float:
        """Return the seconds until the next call; raise `error` if there is none."""
        if self._has_started and self._failures == 0:
            pause_s = random.uniform(0.0, FIRST_PAUSE_S)
        else:
            pause_s = self._policy.delay_s(self._failures - self._has_started)
        if isinstance(error, ResourceExhaustedError):
            pause_s = max(pause_s, error.retry_after_s)
        self._failures += 1
        self._internal += isinstance(error, InternalError)
        resume_at = time.monotonic() + pause_s
        if not self._is_passing(error) or self._is_over(resume_at) or resume_at >= self.deadline:
            raise error
        return pause_s

    def _is_over(self, resume_at: float) -> bool:
        policy = self._policy
        if policy.max_attempts == 1 or self._internal >= policy.max_attempts:
            return True
        if self._transport.has_answered:
            return resume_at - self._since > policy.resume_s
        return self._failures >= policy.max_attempts  # the cluster has never answered

    def _is_passing(self, error: GammarayError) -> bool:
        """Whether the failure may come from a process that died, so that a retry may succeed."""
        if self._transport.is_closed or isinstance(error, _BrokenServerError):
            return False
        if isinstance(error, (UnavailableError, CancelledError)):
            return True
        is_answer = is_from_gammaray(error)
        # gRPC reports UNKNOWN for a stream that a proxy closes without a status.
        if isinstance(error, InternalError) or code_of(error) is grpc.StatusCode.UNKNOWN:
            return self._has_started or not is_answer
        if isinstance(error, NotFoundError):  # from a restarted proxy that knows no application yet
            return not is_answer and self._transport.has_answered
        return self._has_started and isinstance(error, (ResourceExhaustedError, DeadlineExceededError))
