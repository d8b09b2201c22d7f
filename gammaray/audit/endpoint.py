"""Client of an OpenAI-compatible server: bounded requests, retries, answers and tokens."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from gammaray.audit.answers import (
    Answer,
    AnswerError,
    Choice,
    Token,
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
        """Close the connections."""
        await self._http.aclose()

    def beside(self, url: str, **fields: Any) -> Endpoint:
        """Return an endpoint at another URL, or the same one with further fields, that shares the budget."""
        if url == self.url:
            same = (self.model, self.api_key)
        else:
            same = ("", "")  # another server must not get this one's key
        own = (url, *same, self.key_variable, self.concurrency, self.spent, self.timeout_s)
        return Endpoint(
            *own,
            fields={**self.fields, **fields},
            is_chat=self.is_chat,
            num_top=self.num_top,
            refused=self.refused,
        )

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

    def body(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """Return a request: `logprobs` is a number of alternatives, None leaves a field out."""
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

    async def ask(self, prompt: str, **fields: Any) -> Answer:
        """Return a completion that is not streamed, with log-probabilities where the server has them.

        Raises:
            RefusedError: The server does not support the request.
            AnswerError: Its answer is malformed.
            Undecided: The token budget is spent.
            GammarayError: It fails or does not answer in time.
        """
        fields = {"logprobs": self.num_top or None, **fields}
        return await self._within_budget(self.body(prompt, **fields), self._whole)

    async def stream(self, prompt: str, **fields: Any) -> Answer:
        """Return a streamed completion, joined; raises what `ask` does."""
        fields = {"logprobs": self.num_top or None, **fields}
        return await self._within_budget({**self.body(prompt, **fields), "stream": True}, self._joined)

    def curl(self, prompt: str, **fields: Any) -> str:
        """Return the command that sends this request; the key stays in its variable."""
        fields = {"logprobs": self.num_top or None, **fields}
        key = f' -H "authorization: Bearer ${self.key_variable}"' if self.api_key else ""
        body = shlex.quote(json.dumps(self.body(prompt, **fields), ensure_ascii=False))
        return f"curl -sS {shlex.quote(self.path)} -H 'content-type: application/json'{key} -d {body}"

    async def _within_budget(self, body: dict[str, Any], send: Any) -> Answer:
        asked = max(1, int(body.get("max_tokens") or 0)) * int(body.get("n") or 1)
        if asked > self.spent.left:
            raise inconclusive(f"the budget of {self.spent.max_tokens} tokens is spent (--max-tokens-total)")
        self.spent.reserved += asked
        try:
            async with self._places:
                self.spent.requests += 1
                answer: Answer = await asyncio.wait_for(send(body), self.timeout_s)
        except (asyncio.TimeoutError, httpx.TimeoutException):
            raise DeadlineExceededError(f"no answer within {self.timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise UnavailableError(f"{self.path}: {str(error) or type(error).__name__}") from None
        finally:
            self.spent.reserved -= asked
        counted = sum(len(choice.tokens) for choice in answer.choices)
        self.spent.tokens += max(counted, min(answer.usage[1], asked) if answer.usage else counted or asked)
        return answer

    async def _whole(self, body: dict[str, Any]) -> Answer:
        async with _opened(self._http, self.path, body) as response:
            return parse_answer(decoded(await _read(response)))

    async def _joined(self, body: dict[str, Any]) -> Answer:
        choices: dict[int, _Pieces] = {}
        usage, is_done = None, False
        async with _opened(self._http, self.path, body) as response:
            async for event in _events(response):
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
                    choices.setdefault(index, _Pieces()).add(parse_choice(f"choices[{i}]", choice, "delta"))
        if not is_done:
            raise AnswerError("stream", "its end", "`data: [DONE]` at the end")
        return Answer(tuple(choices[index].joined() for index in sorted(choices)), usage, False)


class _Pieces:
    """The pieces of one streamed choice."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._tokens: list[Token] = []
        self._reason: str | None = None

    def add(self, piece: Choice) -> None:
        self._texts.append(piece.text)
        self._tokens += piece.tokens
        self._reason = piece.finish_reason or self._reason

    def joined(self) -> Choice:
        return Choice("".join(self._texts), tuple(self._tokens), self._reason)


class _opened:
    """An open response with status 200; what is refused for load is tried again."""

    def __init__(self, http: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> None:
        self._http, self._url, self._body = http, url, body

    async def __aenter__(self) -> httpx.Response:
        for attempt in range(1, _ATTEMPTS + 1):
            request = self._http.build_request("POST", self._url, json=self._body)
            self._response = await self._http.send(request, stream=True)
            if (status := self._response.status_code) == httpx.codes.OK:
                return self._response
            text = (await _read(self._response, 2**16)).decode(errors="replace")
            after = self._response.headers.get("retry-after", "")
            await self._response.aclose()
            if status not in (429, 503) or attempt == _ATTEMPTS:
                break
            await asyncio.sleep(min(float(after) if after.isdecimal() else 2.0**attempt / 2, _MAX_WAIT_S))
        message = f"{status}: {_message(text)}"
        if status in (401, 403):
            raise UnauthenticatedError(f"{self._url}: {message}")
        raise RefusedError(message) if status in _REFUSALS else UnavailableError(f"{self._url}: {message}")

    async def __aexit__(self, *_: object) -> None:
        await self._response.aclose()


async def _read(response: httpx.Response, limit: int | None = None) -> bytes:
    data, limit = bytearray(), limit or MAX_ANSWER
    async for piece in response.aiter_bytes():
        data += piece
        if len(data) > limit:
            raise AnswerError("body", f"over {limit} bytes", f"at most {limit} bytes")
    return bytes(data)


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events, one line each."""
    pending, total = b"", 0
    async for piece in response.aiter_bytes():
        total += len(piece)
        if total > MAX_ANSWER:
            raise AnswerError("stream", f"over {MAX_ANSWER} bytes", f"at most {MAX_ANSWER} bytes")
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _message(text: str) -> str:
    """Return the message of an error's body, on one line."""
    try:
        error = json.loads(text)
        error = error.get("error", error.get("detail", error)) if isinstance(error, dict) else error
        text = str(error["message"] if isinstance(error, dict) and "message" in error else error)
    except (ValueError, RecursionError):
        pass
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:300]
