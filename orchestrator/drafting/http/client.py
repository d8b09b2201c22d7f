"""HTTP calls to a server that drafts: bounded in time and size, with a key from a file.

The server is not trusted. Whatever it answers becomes a parsed JSON value or a `DraftServerError`; a call
that is cancelled or late closes its connection, which ends the work in servers that notice.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import aiohttp

from gammaray.checks import check_api_key
from gammaray.draft_server import DraftServerUrl
from gammaray.errors import InvalidArgumentError, UnavailableError
from gammaray.security.client_tls import ClientTls
from orchestrator.workers.protocol import Traffic

__all__ = ["DraftClient", "DraftServerError", "Failure", "read_key"]

CONNECT_S = 2.0
"""Upper bound of connecting, TLS included."""

KEEP_ALIVE_S = 75.0
"""Idle connections are closed after this time; servers that close earlier cost a new connection."""

_UNREACHABLE = (aiohttp.ClientConnectionError, OSError)


class Failure(str, Enum):
    """Why a server gave no proposal.

    Attributes:
        CONNECTION: It cannot be reached, or closed the connection.
        TIMEOUT: The answer was late.
        STATUS: A status other than 200.
        SIZE: An answer of too many bytes.
        CONTENT: Not JSON, or not an answer of such a server.
        TOKENS: No token, or first one that is not in the target's vocabulary.
    """

    CONNECTION = "connection"
    TIMEOUT = "timeout"
    STATUS = "status"
    SIZE = "size"
    CONTENT = "content"
    TOKENS = "tokens"


class DraftServerError(UnavailableError):
    """A server gave no proposal; the cycle continues without it.

    Attributes:
        failure: Why.
        code: The HTTP status, 0 without an answer.
    """

    def __init__(self, failure: Failure, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.failure, self.code = failure, code


def read_key(file: str) -> str:
    """Return the key in a file, "" without a file.

    Raises:
        InvalidArgumentError: The file cannot be read, or has no key; the message does not contain it.
    """
    if not file:
        return ""
    try:
        key = Path(file).read_text().strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise InvalidArgumentError("draft_key_file", f"{file} ({reason})", "a readable file") from None
    try:
        check_api_key(key)
    except InvalidArgumentError as error:
        raise InvalidArgumentError("draft_key_file", f"{file} (not shown)", error.allowed) from None
    return key


class DraftClient:
    """Calls of one server, over connections that are kept open; create it in a running event loop.

    Args:
        url: The server.
        key_file: File with its API key; "" for none.
        ca_file: PEM file of the CA of its certificate; "" for the system's.

    Attributes:
        traffic: Bytes of bodies sent and received.

    Raises:
        InvalidArgumentError: A file cannot be read.
    """

    def __init__(self, url: DraftServerUrl, key_file: str = "", ca_file: str = "") -> None:
        self.traffic = Traffic()
        self._root, self._key_file = url.root, key_file
        self._tls: ssl.SSLContext | bool = True
        if url.root.startswith("https:"):
            self._tls = ClientTls(Path(ca_file) if ca_file else None).context()
        self._headers = {"accept": "application/json", "accept-encoding": "identity"}
        self.read_key()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def read_key(self) -> None:
        """Read the key file again, which may have changed.

        Raises:
            InvalidArgumentError: It cannot be read.
        """
        key = read_key(self._key_file)
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def get(self, path: str, timeout_s: float, max_bytes: int) -> Any:
        """Return the JSON value of a GET request.

        Raises:
            DraftServerError: There is none.
        """
        return await self._call("GET", path, None, timeout_s, max_bytes, {})

    async def post(
        self,
        path: str,
        body: bytes,
        timeout_s: float,
        max_bytes: int,
        headers: Mapping[str, str],
    ) -> Any:
        """Return the JSON value of the answer to a POST request.

        Args:
            path: Path below the server's root.
            body: JSON.
            timeout_s: Deadline of the whole call.
            max_bytes: Upper bound of the answer.
            headers: Further headers.

        Raises:
            DraftServerError: There is none.
        """
        own = {"content-type": "application/json", **headers}
        return await self._call("POST", path, body, timeout_s, max_bytes, own)

    async def _call(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float,
        max_bytes: int,
        headers: Mapping[str, str],
    ) -> Any:
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            try:
                data = await self._exchange(method, path, body, deadline, max_bytes, headers)
            except aiohttp.ServerDisconnectedError:  # servers close idle connections at any time
                data = await self._exchange(method, path, body, deadline, max_bytes, headers)
        except asyncio.TimeoutError:  # aiohttp's own are subclasses
            message = f"no answer within {timeout_s:.3g} s"
            raise DraftServerError(Failure.TIMEOUT, message) from None
        except _UNREACHABLE as error:
            raise DraftServerError(Failure.CONNECTION, _reason(error)) from None
        except (aiohttp.ClientError, ValueError) as error:  # bad HTTP; a bad header is a ValueError
            message = f"an answer that is not HTTP ({type(error).__name__})"
            raise DraftServerError(Failure.CONTENT, message) from None
        self.traffic.received += len(data)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise DraftServerError(Failure.CONTENT, "an answer that is not JSON") from None

    async def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | None,
        deadline: float,
        max_bytes: int,
        headers: Mapping[str, str],
    ) -> bytes:
        left_s = max(0.001, deadline - asyncio.get_running_loop().time())
        timeout = aiohttp.ClientTimeout(total=left_s, connect=min(left_s, CONNECT_S), ceil_threshold=60)
        async with self._session.request(
            method,
            f"{self._root}{path}",
            data=body,
            headers={**self._headers, **headers},
            timeout=timeout,
            ssl=self._tls,
            allow_redirects=False,  # the key is for this server alone
        ) as response:
            self.traffic.sent += len(body or b"")
            return await _read(response, max_bytes)


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body of an answer.

    Raises:
        DraftServerError: A status other than 200, or too many bytes; the connection is closed.
    """
    if response.status != 200:  # the body may repeat what was sent, the key included: it is not shown
        status = response.status
        response.close()
        raise DraftServerError(Failure.STATUS, f"status {status}", status)
    pieces, size = list[bytes](), 0
    while piece := await response.content.readany():
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            response.close()
            raise DraftServerError(Failure.SIZE, f"an answer of more than {max_bytes} bytes")
    return b"".join(pieces)


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not valid ({error.certificate_error})"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    return str(error) or type(error).__name__
