"""Client of an OpenAI-compatible server: bounded requests, retries, answers and tokens."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from gammaray.audit.answers import (
    Answer,
    AnswerError,
    Choice,
    decoded,
    parse_answer,
    parse_choice,
    parse_usage,
)
from gammaray.audit.findings import inconclusive
from gammaray.errors import (
    DeadlineExceededError,
    GammarayError,
    InvalidArgumentError,
    UnauthenticatedError,
    UnavailableError,
)

MAX_ANSWER = 2**25
"""Upper bound of an answer, in bytes."""

_ATTEMPTS = 5
_MAX_WAIT_S = 10.0
_REFUSALS = {400, 404, 405, 413, 415, 422, 501}
_COMPLETIONS, _CHATS = "/completions", "/chat/completions"


class RefusedError(GammarayError):
    """The server refuses a request, which says what it does not support."""


@dataclass
class Spent:
    """Requests and tokens so far, and the bound of the tokens."""

    max_tokens: int
    requests: int = 0
    tokens: int = 0
    reserved: int = 0

    @property
    def left(self) -> int:
        """Tokens that may still be asked for."""
        return self.max_tokens - self.tokens - self.reserved


@dataclass
class Endpoint:
    """One server.

    Args:
        url: Its base URL, with or without /v1.
        model: Name of the model in requests; empty leaves the field out.
        api_key: Key, or empty.
        key_variable: Environment variable that holds the key, for printed commands.
        concurrency: Requests in flight at most.
        spent: Counts and bounds tokens.
        timeout_s: Deadline of a request, in seconds.
        fields: Fields that every request has, such as a neutral `top_k`.

    Attributes:
        is_chat: Whether requests are chats.
        num_top: Alternatives that are listed per token; 0 without log-probabilities.
        refused: Fields that the server refuses, with its reasons; they are left out.
    """

    url: str
    model: str
    api_key: str
    key_variable: str
    concurrency: int
    spent: Spent
    timeout_s: float
    fields: dict[str, Any] = field(default_factory=dict)
    is_chat: bool = False
    num_top: int = 0
    refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise InvalidArgumentError("url", self.url, "http(s)://HOST:PORT, without user and query")
        path = parts.path.rstrip("/")
        self.url = f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else f'{path}/v1'}"
        if not re.fullmatch(r"[\x21-\x7e]*", self.api_key):
            raise InvalidArgumentError("api key", "other characters", "visible ASCII characters")
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(headers=headers, timeout=self.timeout_s, limits=limits)
        self._places = asyncio.Semaphore(self.concurrency)

    async def close(self) -> None:
        await self._http.aclose()

    def beside(self, url: str, **fields: Any) -> Endpoint:
        """Return an endpoint at another URL, or the same one with further fields, that shares the budget."""
        fields = {**self.fields, **fields}
        if url == self.url:
            return replace(self, fields=fields, refused={**self.refused})
        # Another server must not get this one's key.
        return replace(self, url=url, model="", api_key="", fields=fields, refused={})

    async def first_model(self) -> str:
        """Return the name of the first model that the server lists; empty if it lists none."""
        try:
            async with self._http.stream("GET", f"{self.url}/models") as response:
                found = decoded(await _read(response)) if response.status_code == httpx.codes.OK else {}
            name = found["data"][0]["id"]
        except httpx.HTTPError as error:
            raise UnavailableError(f"{self.url}: {str(error) or type(error).__name__}") from None
        except (AnswerError, LookupError, TypeError):
            return ""
        return name if isinstance(name, str) else ""

    def body(self, prompt: str | Sequence[int], **fields: Any) -> dict[str, Any]:
        """Return a request; `logprobs` is a number of alternatives, None leaves a field out."""
        fields = {
            name: value for name, value in {**self.fields, **fields}.items() if name not in self.refused
        }
        named = {"model": self.model} if self.model else {}
        if not self.is_chat:
            asked: dict[str, Any] = {"prompt": prompt}
        else:
            asked = {"messages": [{"role": "user", "content": prompt}]}
            if (num_top := fields.pop("logprobs", None)) is not None:
                asked |= {"logprobs": True, "top_logprobs": num_top}
        return {**named, **asked, **{name: value for name, value in fields.items() if value is not None}}

    @property
    def path(self) -> str:
        """Where completions are asked for."""
        return f"{self.url}{_CHATS if self.is_chat else _COMPLETIONS}"

    async def ask(self, prompt: str | Sequence[int], **fields: Any) -> Answer:
        """Return a completion that is not streamed, with log-probabilities where the server has them.

        Raises:
            RefusedError: The server does not support the request.
            AnswerError: Its answer is malformed.
            Undecided: The token budget is spent.
            GammarayError: It fails or does not answer in time.
        """
        return await self._within_budget(prompt, fields, self._whole)

    async def stream(self, prompt: str, **fields: Any) -> Answer:
        """Return a streamed completion, joined; raises what `ask` does."""
        return await self._within_budget(prompt, {**fields, "stream": True}, self._joined)

    def curl(self, body: Mapping[str, Any]) -> str:
        """Return the command that sends a request; the key stays in its variable."""
        key = f' -H "authorization: Bearer ${self.key_variable}"' if self.api_key else ""
        data = shlex.quote(json.dumps(body, ensure_ascii=False))
        return f"curl -sS {shlex.quote(self.path)} -H 'content-type: application/json'{key} -d {data}"

    async def _within_budget(
        self,
        prompt: str | Sequence[int],
        fields: dict[str, Any],
        send: Callable[[dict[str, Any]], Awaitable[Answer]],
    ) -> Answer:
        body = self.body(prompt, **{"logprobs": self.num_top or None, **fields})
        asked = max(1, int(body.get("max_tokens") or 0)) * int(body.get("n") or 1)
        if asked > self.spent.left:
            raise inconclusive(f"the budget of {self.spent.max_tokens} tokens is spent (--max-tokens-total)")
        self.spent.reserved += asked
        try:
            async with self._places:
                self.spent.requests += 1
                answer = await asyncio.wait_for(send(body), self.timeout_s)
        except (asyncio.TimeoutError, httpx.TimeoutException):
            raise DeadlineExceededError(f"no answer within {self.timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise UnavailableError(f"{self.path}: {str(error) or type(error).__name__}") from None
        except AnswerError as error:
            error.curl = self.curl(body)
            raise
        finally:
            self.spent.reserved -= asked
        counted = sum(len(choice.tokens) for choice in answer.choices)
        self.spent.tokens += max(counted, min(answer.usage[1], asked) if answer.usage else counted or asked)
        return replace(answer, curl=self.curl(body))

    async def _whole(self, body: dict[str, Any]) -> Answer:
        async with _opened(self._http, self.path, body) as response:
            return parse_answer(decoded(await _read(response)))

    async def _joined(self, body: dict[str, Any]) -> Answer:
        choices: dict[int, list[Choice]] = {}
        usage, is_done = None, False
        async with _opened(self._http, self.path, body) as response:
            async for event in events(response.aiter_bytes()):
                if event == b"[DONE]":
                    is_done = True
                    break
                fields = decoded(event)
                if not isinstance(fields, dict) or not isinstance(fields.get("choices", []), list):
                    raise AnswerError("event", fields, "an object with `choices`")
                if "error" in fields:
                    raise UnavailableError(f"the stream ended with {str(fields['error'])[:200]}")
                usage = parse_usage(fields.get("usage")) or usage
                for i, choice in enumerate(fields.get("choices", [])):
                    if not isinstance(choice, dict) or not isinstance(index := choice.get("index", i), int):
                        raise AnswerError(f"choices[{i}]", choice, "an object with an index")
                    choices.setdefault(index, []).append(parse_choice(f"choices[{i}]", choice, "delta"))
        if not is_done:
            raise AnswerError("stream", "its end", "`data: [DONE]` at the end")
        if not choices:
            raise AnswerError("stream", "no choice", "at least one")
        return Answer(tuple(_join(choices[index]) for index in sorted(choices)), usage)


def _join(pieces: Sequence[Choice]) -> Choice:
    reasons = [piece.finish_reason for piece in pieces if piece.finish_reason]
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return Choice("".join(piece.text for piece in pieces), tokens, reasons[-1] if reasons else None)


@asynccontextmanager
async def _opened(
    http: httpx.AsyncClient, url: str, body: Mapping[str, Any]
) -> AsyncIterator[httpx.Response]:
    """Yield an open response with status 200; what is refused for load is tried again."""
    for attempt in range(1, _ATTEMPTS + 1):
        async with http.stream("POST", url, json=body) as response:
            if (status := response.status_code) == httpx.codes.OK:
                yield response
                return
            text = (await _read(response, 2**16)).decode(errors="replace")
        if status not in (429, 503) or attempt == _ATTEMPTS:
            break
        after = response.headers.get("retry-after", "")
        await asyncio.sleep(min(float(after) if after.isdecimal() else 2.0**attempt / 2, _MAX_WAIT_S))
    message = f"{status}: {_message(text)}"
    if status in (401, 403):
        raise UnauthenticatedError(f"{url}: {message}")
    raise RefusedError(message) if status in _REFUSALS else UnavailableError(f"{url}: {message}")


async def _read(response: httpx.Response, limit: int | None = None) -> bytes:
    data, limit = bytearray(), limit or MAX_ANSWER
    async for piece in response.aiter_bytes():
        data += piece
        if len(data) > limit:
            raise AnswerError("body", f"over {limit} bytes", f"at most {limit} bytes")
    return bytes(data)


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events, one line each, in time that is linear in the stream's length."""
    line, total = bytearray(), 0
    async for piece in pieces:
        total += len(piece)
        if total > MAX_ANSWER:
            raise AnswerError("stream", f"over {MAX_ANSWER} bytes", f"at most {MAX_ANSWER} bytes")
        first, *others = piece.split(b"\n")
        line += first
        for other in others:
            if line.startswith(b"data:"):
                yield bytes(line[5:]).strip()
            line = bytearray(other)


def _message(text: str) -> str:
    """Return the message of an error's body, on one line."""
    try:
        error = json.loads(text)
        error = error.get("error", error.get("detail", error)) if isinstance(error, dict) else error
        text = str(error["message"] if isinstance(error, dict) and "message" in error else error)
    except (ValueError, RecursionError):
        pass
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:300]
