"""Clients of both APIs that keep asking; what each request got is compared with plain decoding."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from gammaray import AsyncClient, RetryPolicy
from gammaray.errors import GammarayError, ResourceExhaustedError
from tests.chaos.load import PATH, AnswerError, Ask, Heard, Said, Stream, difference

PAUSE_S = 0.2
READ_TIMEOUT_S = 8.0
"""An HTTP client that hears nothing for so long connects again."""

LATE_S = 5.0
"""How long after its deadline a request may end: a busy machine is late."""


@dataclass
class History:
    client: str  # which client made it
    begun_at: float  # on the monotonic clock
    ended_at: float = 0.0  # when the client had its end
    num_tokens: int = 0  # that the client got
    error: str = ""  # type of the error that ended it; empty: none
    wrong: str = ""  # how its tokens differ from plain decoding's; empty: not at all


@dataclass
class Clients:
    """Endless requests of clients; `violations` says what is wrong with what they got."""

    grpc: str  # addresses of the gRPC API, separated by commas, which the streams take in turn
    http: str  # base URL of the HTTP API
    # Of the clients over gRPC; those over HTTP repeat the asks of the first `num_http` of them that have no
    # grammar.
    streams: Sequence[Stream]
    expected: dict[Ask, Said]  # of plain decoding
    deadline_s: float  # of each request
    num_http: int  # number of clients over HTTP
    # Whether a typed error may end a request; else only one that is refused before its first token, as by a
    # full queue.
    may_fail: bool = True
    # How long the SDK resumes a stream without progress; None: until the deadline.
    resume_s: float | None = None
    histories: list[History] = field(default_factory=list)
    arrivals: list[list[float]] = field(default_factory=list)
    # In how many of them each drafter proposed, by way to draft.
    cycles: dict[str, Counter[str]] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _is_ending: bool = False

    @property
    def progress_s(self) -> float:
        """Within which every stream gets a token again after an event, or it is a violation."""
        return self.deadline_s / 2

    def start(self) -> None:
        plain = [stream.ask for stream in self.streams if not stream.ask.grammar][: self.num_http]
        self.arrivals = [[] for _ in range(len(self.streams) + len(plain))]
        self.cycles = {stream.way.name: Counter() for stream in self.streams}
        places = zip(self.streams, self.arrivals, itertools.cycle(self.grpc.split(",")), strict=False)
        works = [self._over_grpc(*place) for place in places]
        works += [self._over_http(*pair) for pair in zip(plain, self.arrivals[len(works) :], strict=True)]
        self._tasks = [asyncio.create_task(work) for work in works]

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        """Keep asking within the context; what is wrong with what they got fails it."""
        self.start()
        try:
            yield
        finally:
            await self.end()
        assert self.violations() == []

    async def have_ended(self, count: int) -> None:
        """Wait until so many more requests have ended, within the deadline of one."""
        wanted = count + self._num_ended
        async with asyncio.timeout(self.deadline_s):
            while self._num_ended < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    @property
    def _num_ended(self) -> int:
        return sum(bool(one.ended_at) for one in self.histories)

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
        found = [f"{one.client}: {one.wrong}" for one in self.histories if one.wrong]
        slow = (one for one in self.histories if one.ended_at - one.begun_at > late)
        found += [f"{one.client}: no end within {late:g} s" for one in slow]
        if not self.may_fail:
            refused = ResourceExhaustedError.__name__
            lost = [one for one in self.histories if one.error and (one.num_tokens or one.error != refused)]
            found += [f"{one.client}: lost after {one.num_tokens} tokens: {one.error}" for one in lost]
        return found

    def all_moved_since(self, moment: float) -> bool:
        return all(times and times[-1] > moment for times in self.arrivals)

    async def _over_grpc(self, stream: Stream, arrivals: list[float], address: str) -> None:
        expected = self.expected[stream.ask]
        retry = RetryPolicy(resume_s=self.resume_s or self.deadline_s)
        async with AsyncClient(address, retry=retry) as client:
            while not self._is_ending:
                history, heard = self._begun(f"gRPC, {stream.way.name}"), Heard(arrivals=arrivals)
                how = stream.way.request(expected.token_ids)
                try:
                    await heard.over_grpc(client, stream.ask, timeout_s=self.deadline_s, **how)
                except GammarayError as error:
                    history.error = type(error).__name__
                    wait_s = error.retry_after_s if isinstance(error, ResourceExhaustedError) else PAUSE_S
                    await asyncio.sleep(wait_s)
                self.cycles[stream.way.name] += heard.cycles
                _close(history, expected, heard.said)

    async def _over_http(self, ask: Ask, arrivals: list[float]) -> None:
        expected, body = self.expected[ask], {"prompt": ask.prompt, **ask.options()}
        async with httpx.AsyncClient(base_url=self.http, timeout=READ_TIMEOUT_S) as http:
            while not self._is_ending:
                history, heard = self._begun("HTTP"), Heard(arrivals=arrivals)
                try:
                    await asyncio.wait_for(hear_all(http, body, heard), self.deadline_s)
                except AnswerError as error:
                    history.error = error.kind
                    await asyncio.sleep(PAUSE_S)
                except asyncio.TimeoutError:
                    history.error = "the client's deadline"
                _close(history, expected, heard.said)

    def _begun(self, client: str) -> History:
        history = History(client, time.monotonic())
        self.histories.append(history)
        return history


async def hear_all(http: httpx.AsyncClient, body: dict[str, object], heard: Heard, path: str = PATH) -> int:
    """Hear a stream to its end, resumed after each break; return its connections, or raise AnswerError."""
    for connections in itertools.count(1):
        try:
            await heard.over_http(http, body, path)
            return connections
        except AnswerError as error:
            if not error.may_pass:
                raise
        except httpx.TransportError:
            pass
        await asyncio.sleep(PAUSE_S)
    raise AssertionError("it is endless")


def _close(history: History, expected: Said, said: Said) -> None:
    """Check what a request got: all of plain decoding, or a part of its beginning and an error."""
    history.ended_at, history.num_tokens = time.monotonic(), len(said.token_ids)
    ids = said.token_ids
    is_beginning = expected.token_ids[: len(ids)] == ids and expected.text.startswith(said.text)
    if said != expected and not (history.error and is_beginning):
        history.wrong = f"{difference(expected, said)} {history.error}"
