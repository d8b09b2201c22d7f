"""gammaray.v1.GenerationService over any `Backend`: converts, calls, converts back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from gammaray.errors import GammarayError, InternalError
from gammaray.types import ProcessStatus
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.convert import chunk_to_proto, process_to_proto, request_from_proto, token_to_proto
from gammaray.wire.rpc_errors import DETAILS_KEY, error_to_status
from gammaray.wire.sessions import info_to_proto
from orchestrator.access.caller import Authenticator, Caller
from orchestrator.api.backend import Backend
from orchestrator.api.grpc_handlers import Unread, read
from orchestrator.api.stalls import while_read
from orchestrator.sessions.lifecycle import REPLAY_TOKENS
from orchestrator.sessions.management import SessionCalls
from orchestrator.text.cpu_threads import INLINE_NUMBERS, in_thread

_logger = logging.getLogger(__name__)


class RpcContext(Protocol):
    """The part of a call's context used here, common to grpc.aio and Ray Serve."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the metadata that the caller sent with the request."""
        ...

    def peer(self) -> str:
        """Return the caller's address."""
        ...

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the status code of the call."""
        ...

    def set_details(self, details: str) -> None:
        """Set the status message."""
        ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str | bytes]]) -> None:
        """Set the metadata that follows the last message."""
        ...


class GenerationServicer:
    """Serves the public gRPC API.

    A method that fails sets the status and returns instead of raising, because Ray Serve drops the trailing
    metadata, and with it the error's details, of methods that raise.

    Args:
        backend: Generates the completions.
        find_proxies: Returns the proxy processes that forward to this one; may block, so it runs in a thread.
        authenticator: Checks API keys; None accepts all callers.
    """

    def __init__(
        self,
        backend: Backend,
        find_proxies: Callable[[], list[ProcessStatus]] = list,
        authenticator: Authenticator | None = None,
    ) -> None:
        self._backend, self._find_proxies = backend, find_proxies
        self._authenticator = authenticator or Authenticator()

    async def generate(
        self, request: pb.GenerateRequest | Unread, context: RpcContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Stream one completion; cancelling the call cancels it."""
        try:
            caller = caller_of(context, self._authenticator)
            chunks = while_read(self._backend.generate(await read(request, request_from_proto), caller))
            async with aclosing(chunks):
                async for chunk in chunks:
                    prompt = chunk.prompt_logprobs
                    if prompt is None or len(prompt.logprobs) + len(prompt.top_logprobs) <= INLINE_NUMBERS:
                        yield chunk_to_proto(chunk)
                    else:
                        yield await in_thread(chunk_to_proto, chunk)
        except Exception as error:
            fail(context, error)

    async def get_status(self, _: pb.GetStatusRequest, context: RpcContext) -> pb.GetStatusResponse:
        """List the processes of the cluster."""
        try:
            caller_of(context, self._authenticator)
            processes = await self._backend.status()
            processes.extend(await asyncio.to_thread(self._find_proxies))
        except Exception as error:
            fail(context, error)
            return pb.GetStatusResponse()
        return pb.GetStatusResponse(processes=[process_to_proto(process) for process in processes])


def caller_of(context: RpcContext, authenticator: Authenticator) -> Caller:
    """Return the authenticated caller; every method calls this first.

    Raises:
        UnauthenticatedError: The caller cannot be authenticated.
    """
    metadata = context.invocation_metadata() or ()
    headers = {name: value for name, value in metadata if isinstance(value, str)}
    return authenticator.identify(headers, context.peer())


def fail(context: RpcContext, error: Exception) -> None:
    """End a call with an error and its details; an error of another class is logged and sent as INTERNAL."""
    if not isinstance(error, GammarayError):
        _logger.error("unexpected error in a call", exc_info=error)
        error = InternalError(f"internal error ({type(error).__name__})")
    status = error_to_status(error)
    context.set_code(error.status)
    context.set_details(status.message)
    context.set_trailing_metadata([(DETAILS_KEY, status.SerializeToString())])


_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class SessionServicer:
    """Serves the RPCs on a caller's sessions.

    Args:
        sessions: Performs the operations.
        authenticator: Checks API keys; None accepts all callers.
    """

    def __init__(self, sessions: SessionCalls, authenticator: Authenticator | None = None) -> None:
        self._sessions, self._authenticator = sessions, authenticator or Authenticator()

    async def get_session(
        self, request: pb.GetSessionRequest | Unread, context: RpcContext
    ) -> pb.GetSessionResponse:
        """Return a session's stored state and tokens."""

        async def answer(asked: pb.GetSessionRequest, caller: Caller) -> pb.GetSessionResponse:
            info, tokens = await self._sessions.get(asked.session_id, caller)
            response = pb.GetSessionResponse(session=info_to_proto(info))
            for start in range(0, len(tokens), REPLAY_TOKENS):
                response.tokens.extend(map(token_to_proto, tokens[start : start + REPLAY_TOKENS]))
                await asyncio.sleep(0)
            return response

        return await self._guarded(request, context, answer, pb.GetSessionResponse())

    async def get_session_trace(
        self, request: pb.GetSessionTraceRequest | Unread, context: RpcContext
    ) -> pb.GetSessionTraceResponse:
        """Return the records of a session's cycles."""

        async def answer(asked: pb.GetSessionTraceRequest, caller: Caller) -> pb.GetSessionTraceResponse:
            return await self._sessions.trace(asked.session_id, caller)

        return await self._guarded(request, context, answer, pb.GetSessionTraceResponse())

    async def list_sessions(
        self, request: pb.ListSessionsRequest | Unread, context: RpcContext
    ) -> pb.ListSessionsResponse:
        """List the caller's sessions."""

        async def answer(asked: pb.ListSessionsRequest, caller: Caller) -> pb.ListSessionsResponse:
            found = await self._sessions.recent(asked.limit, caller)
            return pb.ListSessionsResponse(sessions=[info_to_proto(info) for info in found])

        return await self._guarded(request, context, answer, pb.ListSessionsResponse())

    async def cancel(self, request: pb.CancelRequest | Unread, context: RpcContext) -> pb.CancelResponse:
        """End the current turn of a session."""

        async def answer(asked: pb.CancelRequest, caller: Caller) -> pb.CancelResponse:
            info = await self._sessions.cancel(asked.session_id, caller)
            return pb.CancelResponse(session=info_to_proto(info))

        return await self._guarded(request, context, answer, pb.CancelResponse())

    async def delete_session(
        self, request: pb.DeleteSessionRequest | Unread, context: RpcContext
    ) -> pb.DeleteSessionResponse:
        """Delete a session."""

        async def answer(asked: pb.DeleteSessionRequest, caller: Caller) -> pb.DeleteSessionResponse:
            return pb.DeleteSessionResponse(existed=await self._sessions.delete(asked.session_id, caller))

        return await self._guarded(request, context, answer, pb.DeleteSessionResponse())

    async def _guarded(
        self,
        request: _Request | Unread,
        context: RpcContext,
        answer: Callable[[_Request, Caller], Awaitable[_Response]],
        nothing: _Response,
    ) -> _Response:
        """Authenticate the caller and answer; on failure set the call's status and return `nothing`."""
        try:
            caller = caller_of(context, self._authenticator)
            return await answer(await read(request, _itself), caller)
        except Exception as error:
            fail(context, error)
            return nothing


def _itself(request: _Request) -> _Request:
    return request
