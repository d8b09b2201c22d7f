"""A chat over the HTTP API, which applies the model's chat template.

for piece in Chat("http://localhost:8000").ask("hello"):
    print(piece.text, end="")
"""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import BadStatusLine, HTTPException
from pathlib import Path
from typing import Any, Unpack
from urllib.parse import urlsplit

from gammaray.checks import check_api_key, check_timeout
from gammaray.client.structured import OutputForm, OutputOptions
from gammaray.errors import (
    GammarayError,
    InternalError,
    InvalidArgumentError,
    UnauthenticatedError,
    UnavailableError,
)
from gammaray.security.client_tls import ClientTls, client_tls

_ALLOWED_URL = "http://host:port or https://host:port"
_MAX_TIMEOUT_S = 7 * 86_400.0


@dataclass(frozen=True)
class ChatPiece:
    """A piece of an answer."""

    text: str
    finish_reason: str | None = None  # in the last piece: why the answer ended
    speculation: dict[str, Any] = field(default_factory=dict)  # in the last piece: the object `gammaray`


class Chat:
    """A conversation.

    Args:
        url: Base URL of the HTTP API, with or without /v1; host:port is http:// or, with TLS, https://.
        api_key: API key, for clusters that require one.
        system: The system message; "" for none.
        timeout_s: Longest time without data from the server, in seconds.
        options: Further fields of the request, including `gammaray`.
        tls, ca_file, cert_file, key_file: As in `AsyncClient`.

    Attributes:
        messages: The conversation so far, in the format of the API.

    Raises:
        InvalidArgumentError: A malformed URL, key or timeout, or a file that cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        system: str = "",
        timeout_s: float = 60.0,
        options: dict[str, Any] | None = None,
        tls: bool | None = None,
        ca_file: str | Path | None = None,
        cert_file: str | Path | None = None,
        key_file: str | Path | None = None,
    ) -> None:
        self._tls = client_tls(tls, ca_file, cert_file, key_file, url)
        self._url, self._api_key, self._system = _base_url(url, self._tls), api_key, system
        if api_key is not None:
            check_api_key(api_key)
        if check_timeout("timeout_s", timeout_s) > _MAX_TIMEOUT_S:
            raise InvalidArgumentError("timeout_s", timeout_s, f"at most {_MAX_TIMEOUT_S:g} seconds")
        self._timeout_s, self._options = timeout_s, options or {}
        self.reset()

    def reset(self) -> None:
        """Clear the conversation."""
        self.messages: list[dict[str, str]] = []
        self._answer = (OutputForm(), "", "")
        if self._system:
            self.messages.append({"role": "system", "content": self._system})

    def ask(self, text: str, **options: Unpack[OutputOptions]) -> Iterator[ChatPiece]:
        """Stream the answer to a message; closing the iterator ends it and keeps the text received so far.

        A message whose answer fails before its first piece is not added to the conversation.

        Args:
            text: The message.
            options: The form of the answer, see `OutputOptions`.

        Raises:
            InvalidArgumentError: The form is wrong.
            UnavailableError: The server does not answer, TLS with it fails, or the stream broke.
            GammarayError: The server returned an error.
        """
        form = OutputForm.of(options)
        question, said, reason = {"role": "user", "content": text}, "", "cancelled"
        try:
            for piece in self._pieces([*self.messages, question], form):
                said += piece.text
                reason = piece.finish_reason or reason
                yield piece
        finally:
            self._answer = (form, said, reason)
            if said:
                self.messages += [question, {"role": "assistant", "content": said}]

    @property
    def parsed(self) -> Any:
        """The object that the last answer stands for, if it was asked for with `json_schema`, else None.

        Raises:
            IncompleteOutputError: The answer was cut, for example by `max_tokens`.
        """
        form, said, reason = self._answer
        return form.parsed(said, reason)

    def _pieces(self, messages: list[dict[str, str]], form: OutputForm) -> Iterator[ChatPiece]:
        body = {**self._options, **form.http_fields, "messages": messages, "stream": True}
        context = None if self._tls is None else self._tls.context()
        try:
            with urllib.request.urlopen(
                self._request(body), timeout=self._timeout_s, context=context
            ) as answer:
                for line in answer:
                    if line.startswith(b"data: [DONE]"):
                        return
                    if line.startswith(b"data: "):
                        yield _piece(json.loads(line.removeprefix(b"data: ")))
        except urllib.error.HTTPError as error:
            raise _error(error) from None
        except (OSError, ValueError, HTTPException) as error:
            failure = error.reason if isinstance(error, urllib.error.URLError) else error
            reason = str(failure) or type(failure).__name__
            raise UnavailableError(f"{self._url}: {reason}{_hint(failure)}") from None
        raise UnavailableError(f"{self._url}: the response ended early")

    def _request(self, body: dict[str, Any]) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        return urllib.request.Request(
            f"{self._url}/v1/chat/completions", json.dumps(body).encode(), headers=headers
        )


def _base_url(url: str, tls: ClientTls | None) -> str:
    """Return the complete URL, with scheme."""
    full = url if "://" in url else f"http{'' if tls is None else 's'}://{url}"
    try:
        parts = urlsplit(full)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if "@" in full:
        raise InvalidArgumentError("url", "a URL with a user or password", _ALLOWED_URL)
    if not is_good or parts.query or parts.fragment or re.search(r"[\s\x00-\x1f]", full):
        raise InvalidArgumentError("url", url, _ALLOWED_URL)
    if tls is not None and parts.scheme != "https":
        raise InvalidArgumentError("url", f"{url} with TLS options", "https://host:port")
    return full.rstrip("/").removesuffix("/v1")


def _hint(failure: object) -> str:
    """Return what may be wrong with the URL if the server does not speak HTTP, or no TLS."""
    if isinstance(failure, ssl.SSLError) and failure.reason == "WRONG_VERSION_NUMBER":
        return " (it does not use TLS: http:// instead of https://)"
    if isinstance(failure, (BadStatusLine, ConnectionResetError)):
        return " (is it the HTTP API, on port 8000 by default? does it use TLS, https://?)"
    return ""


def _piece(event: dict[str, Any]) -> ChatPiece:
    if "error" in event:
        raise GammarayError(event["error"]["message"])
    if not event["choices"]:
        return ChatPiece("")
    (choice,) = event["choices"]
    return ChatPiece(choice["delta"].get("content", ""), choice["finish_reason"], event.get("gammaray", {}))


def _error(error: urllib.error.HTTPError) -> GammarayError:
    kind = {401: UnauthenticatedError, 503: UnavailableError}.get(error.code)
    try:
        message = str(json.loads(error.read())["error"]["message"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError, RecursionError):
        # A proxy's page, or the server died after the headers.
        return (kind or InternalError)(f"the server responds with {error.code} {error.reason}")
    return (kind or GammarayError)(message)
