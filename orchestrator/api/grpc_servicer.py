"""gammaray.v1.GenerationService over any `Backend`: converts, calls, converts back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message

from gammaray.errors import GammarayError, InternalError
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.convert import chunk_to_proto, process_to_proto, request_from_proto, token_to_proto
from gammaray.wire.rpc_errors import DETAILS_KEY, error_to_status
from gammaray.wire.sessions import info_to_proto
from orchestrator.access.caller import Authenticator, Caller
from orchestrator.api.backend import Backend
from orchestrator.api.grpc_handlers import Unread, read
from orchestrator.api.stalls import while_read
from orchestrator.sessions.lifecycle import REPLAY_TOKENS
from orchestrator.text.cpu_threads import INLINE_NUMBERS, in_thread

_logger = logging.getLogger(__name__)
_access_log = logging.getLogger("ray.serve")  # Ray writes this logger to a replica's log

RpcContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""The context of a call; that of Ray Serve has the methods that are used here, too."""

_Method = Callable[[Any, Any, Caller], Awaitable[Message]]


def _rpc(response: Callable[[], Message]) -> Callable[[_Method], Any]:
    """Return a decorator that makes a method an RPC with one answer, and that of `response` if it fails."""

    def decorate(method: _Method) -> Any:
        # Serve passes the context by this name.
        async def call(self: Any, request: Message | Unread, grpc_context: RpcContext) -> Message:
            try:
                caller = caller_of(grpc_context, self._authenticator)
                return await method(self, await read(request, lambda message: message), caller)
            except Exception as error:
                fail(grpc_context, error)
                return response()

        return call

    return decorate


class GenerationServicer:
    """Serves the public gRPC API.

    A method that fails sets the status and returns instead of raising, because Ray Serve drops the trailing
    metadata, and with it the error's details, of methods that raise.
    """

    def __init__(self, backend: Backend, authenticator: Authenticator | None = None) -> None:
        self._backend, self._authenticator = backend, authenticator or Authenticator()

    async def generate(
        self, request: pb.GenerateRequest | Unread, grpc_context: RpcContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Stream one completion; cancelling the call cancels it."""
        try:
            caller = caller_of(grpc_context, self._authenticator)
            chunks = while_read(self._backend.generate(await read(request, request_from_proto), caller))
            async with aclosing(chunks):
                async for chunk in chunks:
                    if chunk.is_opening:
                        continue
                    prompt = chunk.prompt_logprobs
                    if prompt is None or len(prompt.logprobs) + len(prompt.top_logprobs) <= INLINE_NUMBERS:
                        yield chunk_to_proto(chunk)
                    else:
                        yield await in_thread(chunk_to_proto, chunk)
        except Exception as error:
            fail(grpc_context, error)

    @_rpc(pb.GetStatusResponse)
    async def get_status(self, _: pb.GetStatusRequest, caller: Caller) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(processes=map(process_to_proto, await self._backend.status()))

    @_rpc(pb.GetSessionResponse)
    async def get_session(self, asked: pb.GetSessionRequest, caller: Caller) -> pb.GetSessionResponse:
        info, tokens = await self._backend.sessions.get(asked.session_id, caller)
        response = pb.GetSessionResponse(session=info_to_proto(info))
        for start in range(0, len(tokens), REPLAY_TOKENS):
            response.tokens.extend(map(token_to_proto, tokens[start : start + REPLAY_TOKENS]))
            await asyncio.sleep(0)
        return response

    @_rpc(pb.GetSessionTraceResponse)
    async def get_session_trace(
        self, asked: pb.GetSessionTraceRequest, caller: Caller
    ) -> pb.GetSessionTraceResponse:
        return await self._backend.sessions.trace(asked.session_id, caller)

    @_rpc(pb.ListSessionsResponse)
    async def list_sessions(self, asked: pb.ListSessionsRequest, caller: Caller) -> pb.ListSessionsResponse:
        found = await self._backend.sessions.recent(asked.limit, caller)
        return pb.ListSessionsResponse(sessions=[info_to_proto(info) for info in found])

    @_rpc(pb.CancelResponse)
    async def cancel(self, asked: pb.CancelRequest, caller: Caller) -> pb.CancelResponse:
        info = await self._backend.sessions.cancel(asked.session_id, caller)
        return pb.CancelResponse(session=info_to_proto(info))

    @_rpc(pb.DeleteSessionResponse)
    async def delete_session(
        self, asked: pb.DeleteSessionRequest, caller: Caller
    ) -> pb.DeleteSessionResponse:
        return pb.DeleteSessionResponse(existed=await self._backend.sessions.delete(asked.session_id, caller))


def caller_of(context: RpcContext, authenticator: Authenticator) -> Caller:
    """Return the caller, who is authenticated; every method calls this first."""
    headers = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
    return authenticator.identify(headers, context.peer())


def fail(context: RpcContext, error: Exception) -> None:
    """End a call with an error and its details; an error of another class is logged and sent as INTERNAL."""
    if not isinstance(error, GammarayError):
        _logger.error("unexpected error in a call", exc_info=error)
        error = InternalError(f"internal error ({type(error).__name__})")
    status = error_to_status(error)
    _access_log.info("CALL failed: %s", error.status.name, extra={"serve_access_log": True})
    context.set_code(error.status)
    context.set_details(status.message)
    context.set_trailing_metadata([(DETAILS_KEY, status.SerializeToString())])
