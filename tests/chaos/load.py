"""What streams ask for, each drafted in its own way, and what plain decoding says to it."""

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from gammaray import AsyncClient
from gammaray.grammar.texts import json_schema_grammar
from gammaray.types import Chunk
from tests.chaos.chaos_drafters import Way, cycles_by_drafter

PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\n",
    "    for key, value in ",
    '"""Parse ',
    "é = 'ünïcödé'\n",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
    "with open(name) as file:\n",
)
PATH = "/v1/completions"

_ROW = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "is_open": {"type": "boolean"},
        "kind": {"enum": ["file", "folder", "link"]},
    },
    "required": ["name", "size", "is_open", "kind"],
}
TABLE: dict[str, Any] = {"type": "array", "items": _ROW, "minItems": 500}


@dataclass(frozen=True)
class Ask:
    """One requested completion, whose tokens depend on its fields only."""

    prompt: str
    temperature: float
    seed: int
    max_tokens: int
    grammar: str = ""

    def options(self) -> dict[str, Any]:
        """Return the options of a request, which are those of both APIs."""
        options: dict[str, Any] = {"temperature": self.temperature, "seed": self.seed}
        options |= {"max_tokens": self.max_tokens, "ignore_eos": not self.grammar}
        return options | ({"grammar": self.grammar} if self.grammar else {})


@dataclass(frozen=True)
class Said:
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Stream:
    """A request that is repeated, and how its tokens are drafted."""

    ask: Ask
    way: Way


def asks(count: int, max_tokens: int) -> list[Ask]:
    """Return asks, every second one greedy and the others sampled at temperature 1 (coupled).

    Of three pairs of these, one follows a JSON schema, of documents longer than the completions.
    """
    grammars = ("", json_schema_grammar(TABLE), "")
    return [
        Ask(PROMPTS[i % len(PROMPTS)], float(i % 2), 1000 + i, max_tokens, grammars[i // 2 % 3])
        for i in range(count)
    ]


def streams(wanted: Sequence[Ask], ways: Sequence[Way]) -> list[Stream]:
    """Return a stream per ask: each way in turn has a greedy and a sampled one."""
    return [Stream(ask, ways[i // 2 % len(ways)]) for i, ask in enumerate(wanted)]


@dataclass
class Heard:
    """What a client has got of a completion."""

    token_ids: tuple[int, ...] = ()  # over HTTP they come with the last event
    text: str = ""
    arrivals: list[float] = field(default_factory=list)  # gets the times of tokens
    # In how many of them each drafter proposed; over gRPC, at the end.
    cycles: Counter[str] = field(default_factory=Counter)
    _last_id: str = ""

    @property
    def said(self) -> Said:
        return Said(self.token_ids, self.text)

    async def over_grpc(self, client: AsyncClient, ask: Ask, **how: Any) -> Said:
        """Hear a completion to its end; the options in `how` change no token."""
        return await self.take(client.generate(ask.prompt, **ask.options(), **how))

    async def take(self, chunks: AsyncIterator[Chunk], count: int | None = None) -> Said:
        """Hear so many chunks, by default all."""
        async for chunk in chunks:
            if chunk.tokens:
                self.arrivals.append(time.monotonic())
            self.token_ids += tuple(token.token_id for token in chunk.tokens)
            self.text += chunk.text
            if chunk.summary is not None:
                self.cycles = cycles_by_drafter(chunk.summary)
            count = None if count is None else count - 1
            if count == 0:
                break
        return self.said

    async def over_http(
        self, http: httpx.AsyncClient, body: dict[str, Any], path: str = PATH, count: int | None = None
    ) -> None:
        """Hear so many events after the last one that was heard, by default all to the end.

        Raises:
            AnswerError: The answer or an event is an error, or the events have no end.
        """
        headers = {"Last-Event-ID": self._last_id} if self._last_id else {}
        async with http.stream("POST", path, json={**body, "stream": True}, headers=headers) as answer:
            if answer.status_code != 200:
                # Serve's new proxy knows no route at first: its 404 is plain text.
                is_of_api = "json" in answer.headers.get("content-type", "")
                may_pass = answer.status_code >= 500 or answer.status_code == 429 or not is_of_api
                content = (await answer.aread())[:300]
                raise AnswerError(f"HTTP {answer.status_code}", repr(content), may_pass=may_pass)
            event_id = ""
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line == "data: [DONE]":
                    return
                elif line.startswith("data: "):
                    self._take(json.loads(line[6:]))
                    self._last_id = event_id or self._last_id
                    count = None if count is None else count - 1
                    if count == 0:
                        return
        raise AnswerError("events without an end", may_pass=True)

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            kind = event["error"]["type"]
            may_pass = kind in ("server_error", "rate_limit_error")
            raise AnswerError(f"event: {kind}", str(event["error"]), may_pass=may_pass)
        (choice,) = event["choices"]
        self.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        self.token_ids = tuple(event.get("gammaray", {}).get("token_ids", self.token_ids))
        self.arrivals.append(time.monotonic())


class AnswerError(Exception):
    """A typed error over HTTP, by its status or type of event; `may_pass`: another attempt may succeed."""

    def __init__(self, kind: str, details: str = "", *, may_pass: bool) -> None:
        super().__init__(f"{kind} {details}")
        self.kind, self.may_pass = kind, may_pass


async def generate(client: AsyncClient, ask: Ask, **how: Any) -> Said:
    """Return one whole completion, which has a salt of its own: it finds no tokens of earlier ones."""
    return await Heard().over_grpc(client, ask, cache_salt=secrets.token_hex(8), **how)


async def reference(address: str, wanted: Sequence[Ask], api_key: str | None = None) -> dict[Ask, Said]:
    """Return the completions of an undisturbed cluster by plain decoding."""
    async with AsyncClient(address, api_key=api_key) as client:
        said = await asyncio.gather(*(generate(client, ask, gamma=0, drafter="none") for ask in wanted))
    return dict(zip(wanted, said, strict=True))


def difference(expected: Said, said: Said) -> str:
    """Return a description of how a completion differs from the expected one."""
    if said.token_ids == expected.token_ids:
        return "the tokens are right, the text is not"
    pairs = zip(expected.token_ids, said.token_ids, strict=False)
    first = next((i for i, (wanted, got) in enumerate(pairs) if wanted != got), None)
    lengths = f"{len(said.token_ids)} tokens of {len(expected.token_ids)}"
    if first is None:
        return f"{lengths}, as far as they go the right ones"
    before = expected.token_ids[max(0, first - 4) : first]
    got, wanted = said.token_ids[first : first + 6], expected.token_ids[first : first + 6]
    return f"{lengths}; from token {first} on {got} instead of {wanted}, after {before}"
