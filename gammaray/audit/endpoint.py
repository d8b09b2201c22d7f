"""Client of an OpenAI-compatible server: bounded requests, retries, answers and tokens."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
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
    escaped,
    rendering,
)

MAX_ANSWER = 2**25
"""Upper bound of an answer, in bytes."""

_BYTES_PER_TOKEN = 1024
_CHARACTERS_PER_TOKEN = 512
_MAX_NAME = 256
_ATTEMPTS = 5
_MAX_WAIT_S = 10.0
_REFUSALS = {400, 404, 405, 413, 415, 422, 501}
_COMPLETIONS, _CHATS = "/completions", "/chat/completions"
_JSON = {"content-type": "application/json"}
_Found = TypeVar("_Found")


class RefusedError(GammarayError):
    """The server refuses a request, which says what it does not support."""


@dataclass
class Spent:
    """Requests and tokens so far, and the bound of the tokens that are asked for."""

    max_tokens: int
    requests: int = 0
    tokens: int = 0
    charged: int = 0
    reserved: int = 0

    @property
    def left(self) -> int:
        """Tokens that may still be asked for."""
        return self.max_tokens - self.charged - self.reserved


@dataclass(frozen=True)
class Bounds:
    """What an answer may hold at most: twice what was asked for, as checks say what is a little too much."""

    num_choices: int
    num_tokens: int
    num_top: int

    @classmethod
    def of(cls, body: Mapping[str, Any], prompt: str | Sequence[int]) -> Bounds:
        """Return the bounds of a request's answer."""
        listed = len(prompt) if body.get("echo") or body.get("prompt_logprobs") else 0
        num_top = int(body.get("top_logprobs") or body.get("logprobs") or 0)
        num_tokens = 2 * int(body.get("max_tokens") or 0) + 16 + listed
        return cls(int(body.get("n") or 1), num_tokens, 2 * num_top + 2)

    @property
    def num_bytes(self) -> int:
        needed = 2**16 + self.num_choices * self.num_tokens * (self.num_top + 2) * _BYTES_PER_TOKEN
        return min(needed, MAX_ANSWER)

    def check(self, answer: Answer) -> None:
        """Raise AnswerError if an answer has more than this."""
        tokens = [len(choice.tokens) for choice in answer.choices]
        texts = [len(choice.text) for choice in answer.choices]
        alternatives = [len(token.listed) for choice in answer.choices for token in choice.tokens]
        found = {
            "choices": (len(answer.choices), 2 * self.num_choices),
            "tokens of a choice": (max(tokens), self.num_tokens),
            "characters of a text": (max(texts), self.num_tokens * _CHARACTERS_PER_TOKEN),
            "alternatives of a token": (max(alternatives, default=0), self.num_top),
        }
        for name, (got, most) in found.items():
            if got > most:
                raise AnswerError(name, got, f"at most {most} for this request")


@dataclass
class Endpoint:
    url: str  # its base URL, with or without /v1
    model: str  # in requests; empty leaves the field out
    api_key: str  # key, or empty
    key_variable: str  # environment variable that holds the key, for printed commands
    concurrency: int  # requests in flight at most
    spent: Spent  # counts and bounds tokens
    timeout_s: float  # deadline of a request, in seconds
    fields: dict[str, Any] = field(default_factory=dict)  # of every request, such as a neutral `top_k`
    is_chat: bool = False  # whether requests are chats
    num_top: int = 0  # alternatives that are listed per token; 0 without log-probabilities
    refused: dict[str, str] = field(default_factory=dict)  # by the server, with reasons; left out of requests

    def __post_init__(self) -> None:
        parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise InvalidArgumentError("url", self.url, "http(s)://HOST:PORT, without user and query")
        path = parts.path.rstrip("/")
        self.url = f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else f'{path}/v1'}"
        if not re.fullmatch(r"[\x21-\x7e]*", self.api_key):
            raise InvalidArgumentError("api key", "other characters", "visible ASCII characters")
        # What is compressed may be a thousand times as long as the bytes that are counted.
        headers = {"accept-encoding": "identity"}
        headers |= {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
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

        async def listed() -> Any:
            async with self._http.stream("GET", f"{self.url}/models") as response:
                return decoded(await _read(response)) if response.status_code == httpx.codes.OK else {}

        try:
            name = (await self._in_time(listed()))["data"][0]["id"]
        except (AnswerError, LookupError, TypeError):
            return ""
        return name[:_MAX_NAME] if isinstance(name, str) else ""

    async def _in_time(self, work: Awaitable[_Found]) -> _Found:
        """Return what the work of one request finds, within its deadline; failures of HTTP become errors."""
        try:
            return await asyncio.wait_for(work, self.timeout_s)
        except (asyncio.TimeoutError, httpx.TimeoutException):
            raise DeadlineExceededError(f"no answer within {self.timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise UnavailableError(f"{self.url}: {str(error) or type(error).__name__}") from None

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
        return f"{self.url}{_CHATS if self.is_chat else _COMPLETIONS}"

    async def ask(self, prompt: str | Sequence[int], **fields: Any) -> Answer:
        """Return a completion that is not streamed, with log-probabilities where the server has them.

        RefusedError if the server does not support the request, AnswerError if its answer is malformed,
        Undecided if the token budget is spent, another GammarayError if it fails or does not answer in time.
        """
        return await self._within_budget(prompt, fields, self._whole)

    async def stream(self, prompt: str, **fields: Any) -> Answer:
        """Return a streamed completion, joined; raises what `ask` does."""
        return await self._within_budget(prompt, {**fields, "stream": True}, self._joined)

    def curl(self, body: Mapping[str, Any]) -> str:
        """Return the command that sends a request; the key stays in its variable."""
        key = f' -H "authorization: Bearer ${self.key_variable}"' if self.api_key else ""
        data = shlex.quote(escaped(json.dumps(body, ensure_ascii=False)))
        return f"curl -sS {shlex.quote(self.path)} -H 'content-type: application/json'{key} -d {data}"

    async def _within_budget(
        self,
        prompt: str | Sequence[int],
        fields: dict[str, Any],
        send: Callable[[dict[str, Any], int], Awaitable[Answer]],
    ) -> Answer:
        body = self.body(prompt, **{"logprobs": self.num_top or None, **fields})
        bounds = Bounds.of(body, prompt)
        asked = bounds.num_choices * max(1, int(body.get("max_tokens") or 0))
        if asked > self.spent.left:
            raise inconclusive(f"the budget of {self.spent.max_tokens} tokens is spent (--max-tokens-total)")
        self.spent.reserved += asked
        try:
            async with self._places:
                self.spent.requests += 1
                answer = await self._in_time(send(body, bounds.num_bytes))
            bounds.check(answer)
        except AnswerError as error:
            error.curl = self.curl(body)
            raise
        finally:
            # An answer that lists fewer tokens must not make the budget last longer.
            self.spent.reserved -= asked
            self.spent.charged += asked
        counted = sum(len(choice.tokens) for choice in answer.choices)
        reported = min(max(answer.usage[1], 0), asked) if answer.usage else 0
        self.spent.tokens += max(counted, reported) or asked
        return replace(answer, curl=self.curl(body))

    async def _whole(self, body: dict[str, Any], limit: int) -> Answer:
        async with _opened(self._http, self.path, body) as response:
            return parse_answer(decoded(await _read(response, limit)))

    async def _joined(self, body: dict[str, Any], limit: int) -> Answer:
        choices: dict[int, list[Choice]] = {}
        usage, is_done = None, False
        async with _opened(self._http, self.path, body) as response:
            async for event in events(_pieces(response, limit)):
                if event == b"[DONE]":
                    is_done = True
                    break
                fields = decoded(event)
                if not isinstance(fields, dict) or not isinstance(fields.get("choices", []), list):
                    raise AnswerError("event", fields, "an object with `choices`")
                if "error" in fields:
                    raise UnavailableError(f"the stream ended with {rendering(fields['error'])[:200]}")
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
        content = json.dumps(body).encode()  # ASCII, as a text of the server may have lone surrogates
        async with http.stream("POST", url, content=content, headers=_JSON) as response:
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


async def _pieces(response: httpx.Response, limit: int) -> AsyncIterator[bytes]:
    """Yield the bytes of a body that is not compressed, up to a limit."""
    encoding, total = response.headers.get("content-encoding", "identity"), 0
    if encoding.strip().lower() not in ("", "identity"):
        raise AnswerError("content-encoding", encoding, "identity, as was asked for")
    async for piece in response.aiter_bytes():
        total += len(piece)
        if total > limit:
            raise AnswerError("body", f"over {limit} bytes", f"at most {limit} bytes for this request")
        yield piece


async def _read(response: httpx.Response, limit: int = 2**20) -> bytes:
    return b"".join([piece async for piece in _pieces(response, limit)])


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events, one line each, in time that is linear in the stream's length."""
    line = bytearray()
    async for piece in pieces:
        first, *others = piece.split(b"\n")
        line += first
        for other in others:
            if line.startswith(b"data:"):
                yield bytes(line[5:]).strip()
            line = bytearray(other)


def _message(text: str) -> str:
    try:
        error = json.loads(text)
        error = error.get("error", error.get("detail", error)) if isinstance(error, dict) else error
        text = str(error["message"] if isinstance(error, dict) and "message" in error else error)
    except (ValueError, RecursionError):
        pass
    return escaped(" ".join(text[:2000].split()))[:300]
