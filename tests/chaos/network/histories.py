"""Clients of both APIs that keep asking; what each request got is compared with plain decoding."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from gammaray import AsyncClient
from gammaray.errors import GammarayError, ResourceExhaustedError
from tests.chaos.load import Ask, Said, Stream, difference

PAUSE_S = 0.2
READ_TIMEOUT_S = 8.0
"""An HTTP client that hears nothing for so long connects again."""

LATE_S = 5.0
"""How long after its deadline a request may end: a busy machine is late."""

SAME = 3
"""So many tokens that are found elsewhere in the expected ones were skipped or repeated."""

PATH = "/v1/completions"


@dataclass
class History:
    """One request.

    Attributes:
        client: Which client made it.
        begun_at: On the monotonic clock.
        ended_at: When the client had its end.
        error: Type of the error that ended it; empty: none.
        kind: "lost", "repeated" or "changed" if its tokens differ from plain decoding's, else "".
        wrong: How they differ.
    """

    client: str
    begun_at: float
    ended_at: float = 0.0
    error: str = ""
    kind: str = ""
    wrong: str = ""


class RequestFailedError(Exception):
    """A typed error over HTTP."""


@dataclass
class Clients:
    """Endless requests of clients; `violations` says what is wrong with what they got.

    Args:
        grpc: Address of the gRPC API.
        http: Base URL of the HTTP API.
        streams: Of the clients over gRPC; those over HTTP repeat the asks of the first `num_http` of them
            that have no grammar.
        expected: Of plain decoding.
        deadline_s: Of each request.
        num_http: Number of clients over HTTP.
    """

    grpc: str
    http: str
    streams: Sequence[Stream]
    expected: dict[Ask, Said]
    deadline_s: float
    num_http: int
    histories: list[History] = field(default_factory=list)
    arrivals: list[list[float]] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _is_ending: bool = False

    def start(self) -> None:
        plain = [stream.ask for stream in self.streams if not stream.ask.grammar][: self.num_http]
        self.arrivals = [[] for _ in range(len(self.streams) + len(plain))]
        works = [self._over_grpc(*pair) for pair in zip(self.streams, self.arrivals, strict=False)]
        works += [self._over_http(*pair) for pair in zip(plain, self.arrivals[len(works) :], strict=True)]
        self._tasks = [asyncio.create_task(work) for work in works]

    async def end(self) -> None:
        """Let each client end its request; one that does not within its deadline is a violation."""
        self._is_ending = True
        _, late = await asyncio.wait(self._tasks, timeout=self.deadline_s + LATE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for history in self.histories:
            history.ended_at = history.ended_at or float("inf")
        for task in set(self._tasks) - late:
            task.result()

    def violations(self) -> list[str]:
        late = self.deadline_s + LATE_S
        return [f"{one.client}: {one.wrong}" for one in self.histories if one.wrong] + [
            f"{one.client}: no end within {late:g} s"
            for one in self.histories
            if one.ended_at - one.begun_at > late
        ]

    def all_moved_since(self, moment: float) -> bool:
        return all(times and times[-1] > moment for times in self.arrivals)

    async def _over_grpc(self, stream: Stream, arrivals: list[float]) -> None:
        expected = self.expected[stream.ask]
        async with AsyncClient(self.grpc) as client:
            while not self._is_ending:
                history = self._begun(f"gRPC, {stream.way.name}")
                got, text = list[int](), ""
                try:
                    async for chunk in client.generate(
                        stream.ask.prompt,
                        timeout_s=self.deadline_s,
                        **_options(stream.ask),
                        **stream.way.request(expected.token_ids),
                    ):
                        got += (token.token_id for token in chunk.tokens)
                        text += chunk.text
                        if chunk.tokens:
                            arrivals.append(time.monotonic())
                except GammarayError as error:
                    history.error = type(error).__name__
                    wait_s = error.retry_after_s if isinstance(error, ResourceExhaustedError) else PAUSE_S
                    await asyncio.sleep(wait_s)
                _close(history, expected, Said(tuple(got), text))

    async def _over_http(self, ask: Ask, arrivals: list[float]) -> None:
        expected = self.expected[ask]
        async with httpx.AsyncClient(base_url=self.http, timeout=READ_TIMEOUT_S) as http:
            while not self._is_ending:
                history, heard = self._begun("HTTP"), Heard(arrivals)
                try:
                    await asyncio.wait_for(heard.all(http, ask), self.deadline_s)
                except RequestFailedError as error:
                    history.error = str(error)
                    await asyncio.sleep(PAUSE_S)
                except asyncio.TimeoutError:
                    history.error = "the client's deadline"
                said = Said(heard.token_ids, heard.text)
                _close(history, expected, said, has_ids=not history.error)

    def _begun(self, client: str) -> History:
        history = History(client, time.monotonic())
        self.histories.append(history)
        return history


class Heard:
    """A stream over HTTP that is resumed after its last event until it ends."""

    def __init__(self, arrivals: list[float]) -> None:
        self.text, self.token_ids = "", tuple[int, ...]()
        self._last_id, self._arrivals = "", arrivals

    async def all(self, http: httpx.AsyncClient, ask: Ask) -> None:
        """Hear the stream to its end.

        Raises:
            RequestFailedError: It ended with an error that no retry mends.
        """
        while True:
            try:
                if await self._some(http, ask):
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(PAUSE_S)

    async def _some(self, http: httpx.AsyncClient, ask: Ask) -> bool:
        body = {"prompt": ask.prompt, **_options(ask), "stream": True}
        headers = {"Last-Event-ID": self._last_id} if self._last_id else {}
        async with http.stream("POST", PATH, json=body, headers=headers) as answer:
            if answer.status_code != 200:
                if answer.status_code >= 500 or answer.status_code == 429:
                    return False
                raise RequestFailedError(f"HTTP {answer.status_code}")
            event_id = ""
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line == "data: [DONE]":
                    return True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return _passes(event["error"])
                    self.text += event["choices"][0]["text"]
                    self.token_ids = tuple(event.get("gammaray", {}).get("token_ids", self.token_ids))
                    self._arrivals.append(time.monotonic())
                    self._last_id = event_id or self._last_id
        return False


def _passes(error: dict[str, object]) -> bool:
    """Return False if a request that ended with an error event may be resumed.

    Raises:
        RequestFailedError: It may not.
    """
    if error["type"] in ("server_error", "rate_limit_error"):
        return False
    raise RequestFailedError(f"event: {error['type']}")


def _options(ask: Ask) -> dict[str, object]:
    options: dict[str, object] = {"temperature": ask.temperature, "seed": ask.seed}
    options |= {"max_tokens": ask.max_tokens, "ignore_eos": not ask.grammar}
    return options | ({"grammar": ask.grammar} if ask.grammar else {})


def _close(history: History, expected: Said, said: Said, *, has_ids: bool = True) -> None:
    """Check what a request got: all of plain decoding, or a part of its beginning and an error."""
    history.ended_at = time.monotonic()
    if not history.error:
        history.kind = kind_of_difference(expected, said)
    else:
        ids = said.token_ids if has_ids else ()
        is_beginning = expected.token_ids[: len(ids)] == ids and expected.text.startswith(said.text)
        history.kind = "" if is_beginning else kind_of_difference(expected, said)
    if history.kind:
        history.wrong = f"{history.kind} {history.error}: {difference(expected, said)}"


def kind_of_difference(expected: Said, said: Said) -> str:
    """Return what was done to the tokens: "lost", "repeated" or "changed"; empty: nothing."""
    wanted, got = expected.token_ids, said.token_ids
    if said == expected:
        return ""
    first = next((i for i, pair in enumerate(zip(wanted, got, strict=False)) if pair[0] != pair[1]), len(got))
    following = got[first : first + SAME]
    if first == len(got) < len(wanted) or _holds(wanted[first:], following):
        return "lost"
    return "repeated" if _holds(wanted[:first], following) else "changed"


def _holds(tokens: tuple[int, ...], some: tuple[int, ...]) -> bool:
    starts = range(len(tokens) - len(some) + 1)
    return bool(some) and any(tokens[at : at + len(some)] == some for at in starts)


def errors_of(histories: Sequence[History]) -> Counter[str]:
    return Counter(one.error for one in histories if one.error)
