"""gammaray.v1.GenerationService over any `Backend`: convert, call, convert back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Protocol

import grpc

from gammaray.errors import GammarayError, InternalError
from gammaray.types import ProcessStatus
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.convert import chunk_to_proto, process_to_proto, request_from_proto
from gammaray.wire.rpc_errors import DETAILS_KEY, error_to_status
from orchestrator.access.caller import Authenticator, Caller
from orchestrator.backend import Backend
from orchestrator.grpc_handlers import Unread, read
from orchestrator.text.cpu_threads import INLINE_NUMBERS, in_thread

__all__ = ["GenerationServicer", "RpcContext", "caller_of", "fail"]

_logger = logging.getLogger(__name__)


class RpcContext(Protocol):
    """What is used of a call's context: both grpc.aio's and Ray Serve's have it."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return what the caller sent beside the request."""
        ...

    def peer(self) -> str:
        """Return where the call comes from."""
        ...

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the status that the call ends with."""
        ...

    def set_details(self, details: str) -> None:
        """Set the message beside the status."""
        ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str | bytes]]) -> None:
        """Set the metadata that follows the last message."""
        ...


class GenerationServicer:
    """Serves the public gRPC API.

    A method that fails sets the status and returns: Ray Serve drops the trailing metadata, and with it the
    error's details, of methods that raise.

    Args:
        backend: What generates.
        find_proxies: Finds the processes in front of this one; it may take its time.
        authenticator: Knows the API keys; None lets everybody in.
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
            chunks = self._backend.generate(await read(request, request_from_proto), caller)
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
    """Return who calls; every method asks first.

    Raises:
        UnauthenticatedError: A stranger.
    """
    metadata = context.invocation_metadata() or ()
    headers = {name: value for name, value in metadata if isinstance(value, str)}
    return authenticator.identify(headers, context.peer())


def fail(context: RpcContext, error: Exception) -> None:
    """End a call with an error, as rich as it is; what is not ours is logged and told as INTERNAL."""
    if not isinstance(error, GammarayError):
        _logger.error("unexpected error in a call", exc_info=error)
        error = InternalError(f"internal error ({type(error).__name__})")
    status = error_to_status(error)
    context.set_code(error.status)
    context.set_details(status.message)
    context.set_trailing_metadata([(DETAILS_KEY, status.SerializeToString())])
