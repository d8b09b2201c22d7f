"""Reading of request bodies, with limits on the size of each, on their total size, and on time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import grpc
from fastapi import Request

from gammaray.errors import GammarayError, InvalidArgumentError, ResourceExhaustedError
from orchestrator.api.http.document import JSON
from orchestrator.api.http.errors import BodyTooLargeError

MAX_BODY_BYTES = 8 * 2**20
"""Largest request body: room for the largest prompt (1 MiB) with every character escaped."""

BODY_TIMEOUT_S = 60.0
"""How long a client may take to send its body."""

_MAX_DRAINED_BYTES = 8 * MAX_BODY_BYTES
"""Bytes of a too large body that are read and dropped, so that its sender receives the error response."""


class BodyTooSlowError(GammarayError):
    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status: ClassVar[int] = 408


class NotJsonError(InvalidArgumentError):
    """A request body has a content type other than JSON."""

    http_status: ClassVar[int] = 415


class BodyReader:
    """Reads request bodies; those held at the same time have at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body of a request; it counts towards the total until the context exits.

        Raises:
            NotJsonError: Its content type is not JSON's. Other types are refused because another site's page
                can send them without a CORS preflight.
            BodyTooLargeError: It is larger than `MAX_BODY_BYTES`.
            BodyTooSlowError: It did not arrive within `BODY_TIMEOUT_S`.
            ResourceExhaustedError: The bodies of all requests would exceed `max_bytes`.
        """
        kind = request.headers.get("content-type")
        if (kind or "").partition(";")[0].strip().lower() != JSON:
            raise NotJsonError("Content-Type", "nothing" if kind is None else repr(kind), JSON)
        parts: list[bytes] = []
        try:
            try:
                await asyncio.wait_for(self._collect(request, parts), BODY_TIMEOUT_S)
            except asyncio.TimeoutError:
                raise BodyTooSlowError(f"the body took longer than {BODY_TIMEOUT_S:g} s to arrive") from None
            yield b"".join(parts)
        finally:
            self.num_bytes -= sum(map(len, parts))

    async def _collect(self, request: Request, parts: list[bytes]) -> None:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > _MAX_DRAINED_BYTES:
                break
            if size > MAX_BODY_BYTES:
                continue
            if self.num_bytes + len(part) > self._max_bytes:
                raise ResourceExhaustedError(
                    f"{self.num_bytes} bytes of other requests' bodies are in memory"
                )
            parts.append(part)
            self.num_bytes += len(part)
        if size > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"the body is over {MAX_BODY_BYTES} bytes, the maximum")
