"""Reading request bodies within bounds: of one body, of all at once, and of time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import grpc
from fastapi import Request

from gammaray.errors import GammarayError, InvalidArgumentError, ResourceExhaustedError
from orchestrator.api.http.errors import BodyTooLargeError

__all__ = ["MAX_BODY_BYTES", "BodyReader", "BodyTooSlowError", "NotJsonError"]

JSON = "application/json"

MAX_BODY_BYTES = 8 * 2**20
"""Largest request body: room for the largest prompt (1 MiB) with every character escaped."""

BODY_TIMEOUT_S = 60.0
"""How long a client may take to send its body."""

_MAX_DRAINED_BYTES = 8 * MAX_BODY_BYTES
"""How much of a body that is too large is read, so that its sender gets to see the answer."""


class BodyTooSlowError(GammarayError):
    """A request body did not come in time."""

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status: ClassVar[int] = 408


class NotJsonError(InvalidArgumentError):
    """A request body of another content type than JSON."""

    http_status: ClassVar[int] = 415


class BodyReader:
    """The request bodies that are held at this moment.

    Args:
        max_bytes: Upper bound of them all.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body of a request, which counts until the context is left.

        Raises:
            NotJsonError: Its content type is another one than JSON's. A page of another site can send only
                such a body without a request for permission before.
            BodyTooLargeError: It is above `MAX_BODY_BYTES`.
            BodyTooSlowError: It takes its sender too long.
            ResourceExhaustedError: There is no room beside the bodies of others.
        """
        kind = request.headers.get("content-type")
        if (kind or "").partition(";")[0].strip().lower() != JSON:
            raise NotJsonError("Content-Type", "nothing" if kind is None else repr(kind), JSON)
        parts: list[bytes] = []
        try:
            try:
                await asyncio.wait_for(self._collect(request, parts), BODY_TIMEOUT_S)
            except asyncio.TimeoutError:
                raise BodyTooSlowError(f"the body took longer than {BODY_TIMEOUT_S:g} s to come") from None
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
                raise ResourceExhaustedError(f"{self.num_bytes} bytes of other requests' bodies are held")
            parts.append(part)
            self.num_bytes += len(part)
        if size > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"the body is over {MAX_BODY_BYTES} bytes, the most this server reads")
