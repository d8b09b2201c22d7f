"""The session calls of gammaray.v1.GenerationService: convert, call, convert back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import Message

from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.convert import token_to_proto
from gammaray.wire.sessions import info_to_proto
from orchestrator.access.caller import Authenticator, Caller
from orchestrator.grpc_api import RpcContext, caller_of, fail
from orchestrator.grpc_handlers import Unread, read
from orchestrator.sessions.lifecycle import REPLAY_TOKENS
from orchestrator.sessions.management import SessionCalls

__all__ = ["SessionServicer"]

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class SessionServicer:
    """Serves what callers may ask and do about their sessions.

    Args:
        sessions: Does it.
        authenticator: Knows the API keys; None lets everybody in.
    """

    def __init__(self, sessions: SessionCalls, authenticator: Authenticator | None = None) -> None:
        self._sessions, self._authenticator = sessions, authenticator or Authenticator()

    async def get_session(
        self, request: pb.GetSessionRequest | Unread, context: RpcContext
    ) -> pb.GetSessionResponse:
        """Tell what the store knows of a session."""

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
        """Tell what each cycle of a session did."""

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
        """Forget a session."""

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
        """Answer a request of a known caller; what fails is the call's status, beside an empty message."""
        try:
            caller = caller_of(context, self._authenticator)
            return await answer(await read(request, _itself), caller)
        except Exception as error:
            fail(context, error)
            return nothing


def _itself(request: _Request) -> _Request:
    return request
