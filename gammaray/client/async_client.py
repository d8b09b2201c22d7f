"""The gRPC client: streams completions, manages sessions and reports the state of a cluster.

    async with gammaray.AsyncClient("127.0.0.1:9000") as client:
        async for chunk in client.generate("def main():", max_tokens=64, seed=1):
            print(chunk.text, end="")
        completion = await client.complete("def main():", temperature=0)
        print(completion.text, completion.summary.alpha)

gammaray.Client is the same without `async` and `await`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Self, Unpack

import grpc

from gammaray.checks import check_int
from gammaray.client.completion import Completion
from gammaray.client.request import GenerateOptions, Prompt, build_with_form
from gammaray.client.resume import stream_completion
from gammaray.client.structured import OutputForm
from gammaray.client.transport import RetryPolicy, Transport
from gammaray.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    renaming,
)
from gammaray.security.client_tls import client_tls
from gammaray.types import Chunk, EmittedToken, GenerationRequest, ProcessStatus
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire import convert
from gammaray.wire.convert import process_from_proto
from gammaray.wire.cycles import CycleRecord, cycles_from_proto
from gammaray.wire.sessions import SessionInfo, info_from_proto

STATUS_TIMEOUT_S = 10.0
"""Default deadline of status calls, in seconds."""

# Errors of a cluster that is still starting: the port is closed, the proxy knows no application yet, or the
# first calls hang until they time out.
_STARTING = (UnavailableError, NotFoundError, DeadlineExceededError, CancelledError)


async def _renamed(chunks: AsyncGenerator[Chunk, None], option: str) -> AsyncGenerator[Chunk, None]:
    """Yield chunks; errors about the grammar name the option that it was made of."""
    async with aclosing(chunks):
        with renaming(grammar=option):
            async for chunk in chunks:
                yield chunk


class AsyncClient:
    """A connection to a cluster. Not thread-safe; bound to the event loop of its first call.

    Args:
        address: host:port of the gRPC API; https://host:port and grpcs://host:port use TLS.
        api_key: API key, for clusters that require one.
        timeout_s: Deadline of a generation, in seconds, unless the call says otherwise.
        retry: How often calls are retried, and for how long completions are resumed.
        credentials: gRPC channel credentials, instead of the options below.
        tls: Whether to use TLS, which trusts the system's authorities unless `ca_file` names others. None:
            only if the address or one of the files implies it.
        ca_file: PEM file of the trusted authorities; implies TLS.
        cert_file: PEM file of the client certificate, for servers that require one; implies TLS.
        key_file: PEM file of its private key; None: it is in `cert_file`.

    Raises:
        InvalidArgumentError: A malformed address, key or timeout, or a file that cannot be used.
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
        """Stream one completion; leaving the loop or closing the iterator cancels it on the server.

        When a server process dies, the stream is resumed after the last received token. No token is repeated,
        dropped or changed; `RetryPolicy` limits how long resuming is tried.

        Args:
            prompt: Text, token ids, or a GenerationRequest.
            timeout_s: Deadline of the whole completion, in seconds; None: the client's `timeout_s`.
            options: See `gammaray.client.request.GenerateOptions`.

        Returns:
            An iterator of chunks; the last one carries `finish_reason`, `usage` and `summary`.

        Raises:
            InvalidArgumentError: Immediately if the client can detect it, else from the iterator.
            GammarayError: From the iterator; the subclass names the cause.
        """
        request, form = build_with_form(prompt, options)
        return self._stream(request, form, timeout_s)

    async def complete(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Return a finished completion; arguments and errors are those of `generate`.

        With `json_schema`, `parsed` of the completion is the object that its text stands for.
        """
        request, form = build_with_form(prompt, options)
        return Completion.from_chunks([chunk async for chunk in self._stream(request, form, timeout_s)], form)

    def _stream(
        self, request: GenerationRequest, form: OutputForm, timeout_s: float | None
    ) -> AsyncGenerator[Chunk, None]:
        chunks = stream_completion(self._transport, request, timeout_s)
        return _renamed(chunks, form.name) if form.name not in ("", "grammar") else chunks

    def resume(
        self, session_id: str, *, turn: int = 0, offset: int = 0, timeout_s: float | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the rest of a session's turn, after its first `offset` tokens; otherwise as `generate`.

        A session has one owner: a client that is streaming it at present gets FailedPreconditionError.

        Raises:
            InvalidArgumentError: Immediately, if the client can detect it.
            NotFoundError: From the iterator: no such session, or it has expired.
            FailedPreconditionError: From the iterator: the session is at another turn, or has fewer tokens.
        """
        request = GenerationRequest("", session_id=session_id, turn=turn, resume_from=offset)
        request.validate()
        return stream_completion(self._transport, request, timeout_s)

    async def get_session(
        self, session_id: str, *, timeout_s: float = STATUS_TIMEOUT_S
    ) -> tuple[SessionInfo, tuple[EmittedToken, ...]]:
        """Return a session and the tokens emitted in its turn; NotFoundError if there is none (any more)."""
        request = pb.GetSessionRequest(session_id=session_id)
        answer = await self._transport.unary("GetSession", request, timeout_s)
        tokens = tuple(convert.token_from_proto(token) for token in answer.tokens)
        return info_from_proto(answer.session), tokens

    async def session_trace(
        self, session_id: str, *, timeout_s: float = STATUS_TIMEOUT_S
    ) -> list[CycleRecord]:
        """Return the cycle records of a session, oldest first: tokens and time per phase of each cycle.

        Records are written in the background: just after a completion the last ones may still be missing.

        Raises:
            NotFoundError: No such session, or it has expired.
        """
        request = pb.GetSessionTraceRequest(session_id=session_id)
        return cycles_from_proto((await self._transport.unary("GetSessionTrace", request, timeout_s)).cycles)

    async def list_sessions(
        self, limit: int = 100, *, timeout_s: float = STATUS_TIMEOUT_S
    ) -> list[SessionInfo]:
        """Return at most `limit` sessions (up to 1000), the most recently active first."""
        check_int("limit", limit, 1, 1000)
        answer = await self._transport.unary("ListSessions", pb.ListSessionsRequest(limit=limit), timeout_s)
        return [info_from_proto(session) for session in answer.sessions]

    async def cancel(self, session_id: str, *, timeout_s: float = STATUS_TIMEOUT_S) -> SessionInfo:
        """End a session's current turn permanently; a client streaming it gets FinishReason.CANCELLED.

        Raises:
            NotFoundError: No such session, or it has expired.
        """
        request = pb.CancelRequest(session_id=session_id)
        return info_from_proto((await self._transport.unary("Cancel", request, timeout_s)).session)

    async def delete_session(self, session_id: str, *, timeout_s: float = STATUS_TIMEOUT_S) -> bool:
        """End and delete a session; return whether it existed."""
        request = pb.DeleteSessionRequest(session_id=session_id)
        return bool((await self._transport.unary("DeleteSession", request, timeout_s)).existed)

    async def status(self, *, timeout_s: float = STATUS_TIMEOUT_S) -> list[ProcessStatus]:
        """Return the processes of the cluster."""
        answer = await self._transport.unary("GetStatus", pb.GetStatusRequest(), timeout_s)
        return [process_from_proto(process) for process in answer.processes]

    async def wait_ready(
        self, timeout_s: float = 60.0, *, roles: Collection[str] = ("target",)
    ) -> list[ProcessStatus]:
        """Wait until each of `roles` has a healthy process, and return the cluster's status.

        A target alone can serve completions; add "draft" to wait until speculation is available.

        Raises:
            DeadlineExceededError: It took longer than `timeout_s`; the message names what was missing.
            GammarayError: A failure that does not pass by waiting, for example UnauthenticatedError.
        """
        deadline = time.monotonic() + timeout_s
        missing = "no response yet"
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
            await self._transport.pause(min(0.2, max(0.0, deadline - time.monotonic())))
        raise DeadlineExceededError(f"not ready after {timeout_s:g} s: {missing}")

    async def close(self) -> None:
        """Close the connection; completions in flight are cancelled."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
