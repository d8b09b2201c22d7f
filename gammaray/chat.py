"""A chat over the HTTP API, which knows the model's chat template.

for piece in Chat("http://localhost:8000").ask("hello"):
    print(piece.text, end="")
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gammaray.errors import GammarayError, InternalError, UnauthenticatedError, UnavailableError
from gammaray.types import EmittedToken, TokenOrigin

__all__ = ["Chat", "ChatPiece"]


@dataclass(frozen=True)
class ChatPiece:
    """A piece of an answer.

    Args:
        text: Its text.
        tokens: The tokens it came from.
        finish_reason: In the last piece: why the answer ended.
        speculation: In the last piece: the response object `gammaray`.
    """

    text: str
    tokens: tuple[EmittedToken, ...] = ()
    finish_reason: str | None = None
    speculation: dict[str, Any] = field(default_factory=dict)


class Chat:
    """A conversation.

    Args:
        url: Base of the HTTP API, without /v1.
        api_key: For clusters that ask for one.
        system: What the model is told before everything else; "" for nothing.
        timeout_s: Longest silence of the server.
        options: Further fields of the request, `gammaray` among them.

    Attributes:
        messages: The conversation so far, as the API wants it.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        system: str = "",
        timeout_s: float = 60.0,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._url, self._api_key, self._system = url.rstrip("/"), api_key, system
        self._timeout_s, self._options = timeout_s, options or {}
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages: list[dict[str, str]] = []
        if self._system:
            self.messages.append({"role": "system", "content": self._system})

    def ask(self, text: str) -> Iterator[ChatPiece]:
        """Stream the answer to a message; closing the iterator ends it, and what was said so far stays.

        A message whose answer fails before it begins is not part of the conversation.

        Raises:
            UnavailableError: Nobody answers, or the stream broke.
            GammarayError: What the server says is wrong.
        """
        question, said = {"role": "user", "content": text}, ""
        try:
            for piece in self._pieces([*self.messages, question]):
                said += piece.text
                yield piece
        finally:
            if said:
                self.messages += [question, {"role": "assistant", "content": said}]

    def _pieces(self, messages: list[dict[str, str]]) -> Iterator[ChatPiece]:
        extra = {**self._options.get("gammaray", {}), "stream_tokens": True}
        body = {**self._options, "messages": messages, "stream": True, "gammaray": extra}
        try:
            with urllib.request.urlopen(self._request(body), timeout=self._timeout_s) as answer:
                for line in answer:
                    if line.startswith(b"data: [DONE]"):
                        return
                    if line.startswith(b"data: "):
                        yield _piece(json.loads(line.removeprefix(b"data: ")))
        except urllib.error.HTTPError as error:
            raise _error(error) from None
        except (
            OSError,
            ValueError,
        ) as error:  # no such server, a silent one, or one that says something else
            raise UnavailableError(f"{self._url}: {getattr(error, 'reason', error)}") from None
        raise UnavailableError(f"{self._url}: the answer broke off")

    def _request(self, body: dict[str, Any]) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        return urllib.request.Request(
            f"{self._url}/v1/chat/completions", json.dumps(body).encode(), headers=headers
        )


def _piece(event: dict[str, Any]) -> ChatPiece:
    if "error" in event:
        raise GammarayError(event["error"]["message"])
    if not event["choices"]:
        return ChatPiece("")
    (choice,), own = event["choices"], event.get("gammaray", {})
    tokens = tuple(
        EmittedToken(token["id"], TokenOrigin(token["origin"]), bytes(token["bytes"]))
        for token in own.get("tokens", ())
    )
    return ChatPiece(choice["delta"].get("content", ""), tokens, choice["finish_reason"], own)


def _error(error: urllib.error.HTTPError) -> GammarayError:
    try:
        message = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return InternalError(f"the server answers {error.code} {error.reason}")
    kinds = {401: UnauthenticatedError, 503: UnavailableError}
    return kinds.get(error.code, GammarayError)(message)
