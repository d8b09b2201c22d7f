"""The client: streams completions and tells the state of a cluster, over gRPC.

    async with gammaray.AsyncClient("127.0.0.1:9000") as client:
        async for chunk in client.generate("def main():", max_tokens=64, seed=1):
            print(chunk.text, end="")
        completion = await client.complete("def main():", temperature=0)
        print(completion.text, completion.summary.alpha)

gammaray.Client is the same without `async` and `await`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import grpc

from gammaray.checks import check_int
from gammaray.client.completion import Completion
from gammaray.client.request import Prompt, build_request
from gammaray.client.resume import stream_completion
from gammaray.client.transport import RetryPolicy, Transport
from gammaray.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from gammaray.security.client_tls import client_tls
from gammaray.types import Chunk, EmittedToken, GenerationRequest, ProcessStatus
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire import convert
from gammaray.wire.convert import process_from_proto
from gammaray.wire.cycles import CycleRecord, cycles_from_proto
from gammaray.wire.sessions import SessionInfo, info_from_proto

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from gammaray.client.request import GenerateOptions

__all__ = ["AsyncClient"]

STATUS_TIMEOUT_S = 10.0
"""Deadline of status calls, in seconds."""

# What a cluster that is still starting answers: nobody listens, the proxy knows no application yet, or the
# first calls hang until they are cut.
_STARTING = (UnavailableError, NotFoundError, DeadlineExceededError, CancelledError)


class AsyncClient:
    """A connection to a cluster. Not thread-safe; belongs to the event loop of its first call.

    Args:
        address: host:port of the gRPC API; https://host:port and grpcs://host:port use TLS.
        api_key: Key of a cluster that asks for one.
        timeout_s: Deadline of a generation, in seconds, unless the call says otherwise.
        retry: How often calls are made again, and for how long completions are resumed.
        credentials: Credentials of gRPC's own, in place of the options below.
        tls: Use TLS, and trust the authorities of the system unless `ca_file` names others. None: where the
            address or one of the files asks for it.
        ca_file: PEM file of the authorities to trust; implies TLS.
        cert_file: PEM file of the client certificate, for servers that require one; implies TLS.
        key_file: PEM file of its private key; None: it is in `cert_file`.

    Raises:
        InvalidArgumentError: A malformed address, key or timeout, or a file that cannot be used.

    Calls raise TlsError where a certificate is not accepted or one side speaks plain text.
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
        if credentials is not None and (tls is not None or ca_file or cert_file or key_file):
            raise InvalidArgumentError("credentials", "credentials and TLS options", "one of the two")
        self._transport = Transport(
            address,
            api_key=api_key,
            timeout_s=timeout_s,
            retry=retry or RetryPolicy(),
            credentials=credentials,
            tls=client_tls(tls, ca_file, cert_file, key_file, address),
        )

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Stream one completion; leaving the loop or closing the iterator stops it on the server.

        The stream outlives the processes behind it: when one dies, it is resumed behind the last token that
        has arrived. Nothing is repeated, dropped or changed; `RetryPolicy` says how long it is tried for.

        Args:
            prompt: Text, token ids, or a GenerationRequest.
            timeout_s: Deadline of the whole completion, in seconds; None is the client's.
            options: See `gammaray.client.request.GenerateOptions`.

        Returns:
            An iterator of chunks; the last one carries `finish_reason`, `usage` and `summary`.

        Raises:
            InvalidArgumentError: At once for what can be seen here, else from the iterator.
            GammarayError: From the iterator, the subclass that fits.
        """
        return stream_completion(self._transport, build_request(prompt, **options), timeout_s)

    async def complete(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Return one whole completion; arguments and errors are those of `generate`."""
        return Completion.from_chunks(
            [chunk async for chunk in self.generate(prompt, timeout_s=timeout_s, **options)]
        )

    def resume(
        self, session_id: str, *, turn: int = 0, offset: int = 0, timeout_s: float | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the rest of a session's turn, behind its first `offset` tokens; otherwise as `generate`.

        Whoever streams it at present gets FailedPreconditionError: a session has one owner.

        Raises:
            InvalidArgumentError: At once, for what can be seen here.
            NotFoundError: From the iterator: no such session, or it has expired.
            FailedPreconditionError: From the iterator: it is at another turn, or has fewer tokens.
        """
        request = GenerationRequest("", session_id=session_id, turn=turn, resume_from=offset)
        request.validate()
        return stream_completion(self._transport, request, timeout_s)

    async def get_session(
        self, session_id: str, *, timeout_s: float = STATUS_TIMEOUT_S
    ) -> tuple[SessionInfo, tuple[EmittedToken, ...]]:
        """Return a session and the tokens emitted in its current turn.

        Raises:
            NotFoundError: No such session, or it has expired.
        """
        request = pb.GetSessionRequest(session_id=session_id)
        answer = await self._transport.unary("GetSession", request, timeout_s)
        tokens = tuple(convert.token_from_proto(token) for token in answer.tokens)
        return info_from_proto(answer.session), tokens

    async def session_trace(
        self, session_id: str, *, timeout_s: float = STATUS_TIMEOUT_S
    ) -> list[CycleRecord]:
        """Return what each cycle of a session did and where its time went, oldest first.

        Raises:
            NotFoundError: No such session, or it has expired.
        """
        request = pb.GetSessionTraceRequest(session_id=session_id)
        return cycles_from_proto((await self._transport.unary("GetSessionTrace", request, timeout_s)).cycles)

    async def list_sessions(
        self, limit: int = 100, *, timeout_s: float = STATUS_TIMEOUT_S
    ) -> list[SessionInfo]:
        """Return sessions, the one with the latest sign of life first; at most `limit`, up to 1000."""
        check_int("limit", limit, 1, 1000)
        answer = await self._transport.unary("ListSessions", pb.ListSessionsRequest(limit=limit), timeout_s)
        return [info_from_proto(session) for session in answer.sessions]

    async def cancel(self, session_id: str, *, timeout_s: float = STATUS_TIMEOUT_S) -> SessionInfo:
        """End a session's current turn for good; whoever streams it gets FinishReason.CANCELLED.

        Raises:
            NotFoundError: No such session, or it has expired.
        """
        request = pb.CancelRequest(session_id=session_id)
        return info_from_proto((await self._transport.unary("Cancel", request, timeout_s)).session)

    async def delete_session(self, session_id: str, *, timeout_s: float = STATUS_TIMEOUT_S) -> bool:
        """End a session and forget it; return whether there was one."""
        request = pb.DeleteSessionRequest(session_id=session_id)
        return bool((await self._transport.unary("DeleteSession", request, timeout_s)).existed)

    async def status(self, *, timeout_s: float = STATUS_TIMEOUT_S) -> list[ProcessStatus]:
        """Return the processes of the cluster.

        Raises:
            GammarayError: The subclass that fits.
        """
        answer = await self._transport.unary("GetStatus", pb.GetStatusRequest(), timeout_s)
        return [process_from_proto(process) for process in answer.processes]

    async def wait_ready(
        self, timeout_s: float = 60.0, *, roles: Collection[str] = ("target",)
    ) -> list[ProcessStatus]:
        """Wait until each of `roles` has a healthy process, and return the cluster's status then.

        A target is all that lossless text takes; name "draft" too to wait for its speed.

        Raises:
            DeadlineExceededError: It took longer than `timeout_s`; tells what was missing.
            GammarayError: A failure that waiting does not cure, for example UnauthenticatedError.
        """
        deadline = time.monotonic() + timeout_s
        missing = "no answer yet"
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                processes = await self.status(timeout_s=min(left_s, STATUS_TIMEOUT_S))
            except _STARTING as error:
                missing = str(error)
            else:
                healthy = {process.role for process in processes if process.healthy}
                if healthy.issuperset(roles):
                    return processes
                missing = f"no healthy {', '.join(sorted(set(roles) - healthy))}"
            await asyncio.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
        raise DeadlineExceededError(f"not ready after {timeout_s:g} s: {missing}")

    async def close(self) -> None:
        """Close the connection; completions in flight are cancelled."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
