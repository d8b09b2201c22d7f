"""Endless streams, each drafted in its own way, with its expected completion."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gammaray import AsyncClient, RetryPolicy
from gammaray.errors import GammarayError, ResourceExhaustedError
from gammaray.grammar.texts import json_schema_grammar
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


@dataclass(frozen=True)
class Said:
    """One completion: token ids and text, and how many cycles each drafter proposed in."""

    token_ids: tuple[int, ...]
    text: str
    cycles: Counter[str] = field(default_factory=Counter, compare=False)


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
class Tally:
    """Outcomes of the streams."""

    finished: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    num_tokens: int = 0
    refused: int = 0
    cycles: dict[str, Counter[str]] = field(default_factory=dict)


async def generate(
    client: AsyncClient, ask: Ask, arrivals: list[float], tally: Tally | None = None, **how: Any
) -> Said:
    """Return one whole completion; add the arrival times of tokens to `arrivals`.

    The options in `how` (gamma, drafter, prediction) change no token. Unless they name a salt, the completion
    has one of its own, which keeps it from finding its tokens in an earlier one's output.
    """
    token_ids: list[int] = []
    text: list[str] = []
    cycles: Counter[str] = Counter()
    options: dict[str, Any] = {"temperature": ask.temperature, "seed": ask.seed, "max_tokens": ask.max_tokens}
    options |= {"grammar": ask.grammar, "ignore_eos": not ask.grammar, "cache_salt": secrets.token_hex(8)}
    arrivals.append(time.monotonic())
    async for chunk in client.generate(ask.prompt, **{**options, **how}):
        if chunk.tokens:
            arrivals.append(time.monotonic())
        token_ids += (token.token_id for token in chunk.tokens)
        text.append(chunk.text)
        if tally is not None:
            tally.num_tokens += len(chunk.tokens)
        if chunk.summary is not None:
            cycles = cycles_by_drafter(chunk.summary)
    return Said(tuple(token_ids), "".join(text), cycles)


async def reference(address: str, wanted: Sequence[Ask]) -> dict[Ask, Said]:
    """Return the completions of an undisturbed cluster by plain decoding."""
    async with AsyncClient(address) as client:
        said = await asyncio.gather(*(generate(client, ask, [], gamma=0, drafter="none") for ask in wanted))
    return dict(zip(wanted, said, strict=True))


class Load:
    """Streams that are restarted when they end; each completion is compared with the reference."""

    def __init__(
        self,
        address: str,
        wanted: Sequence[Stream],
        expected: dict[Ask, Said],
        retry: RetryPolicy | None = None,
    ) -> None:
        self._address, self._wanted, self._expected, self._retry = address, wanted, expected, retry
        self.tally = Tally(cycles={stream.way.name: Counter() for stream in wanted})
        self.arrivals: list[list[float]] = [[] for _ in wanted]
        self._is_ending = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        pairs = zip(self._wanted, self.arrivals, strict=True)
        self._tasks = [asyncio.create_task(self._repeat(*pair)) for pair in pairs]

    async def end(self, timeout_s: float) -> None:
        """Wait until the streams end; those that do not within `timeout_s` are lost."""
        self._is_ending = True
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
            self.tally.lost.append(f"no end within {timeout_s:g} s after the last strike")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def all_moved_since(self, moment: float) -> bool:
        return all(times and times[-1] > moment for times in self.arrivals)

    def all_moved_between(self, first: float, last: float) -> bool:
        return all(any(first < time <= last for time in reversed(times)) for times in self.arrivals)

    async def _repeat(self, stream: Stream, arrivals: list[float]) -> None:
        ask, way, tally = stream.ask, stream.way, self.tally
        expected = self._expected[ask]
        async with AsyncClient(self._address, retry=self._retry) as client:
            while not self._is_ending:
                begun = len(arrivals)
                try:
                    said = await generate(client, ask, arrivals, tally, **way.request(expected.token_ids))
                except GammarayError as error:
                    if isinstance(error, ResourceExhaustedError) and len(arrivals) == begun + 1:
                        tally.refused += 1
                        await asyncio.sleep(error.retry_after_s)
                        continue
                    tally.lost.append(f"{way.name}: {type(error).__name__}: {error}")
                    await asyncio.sleep(0.5)  # it would fail again at once
                    continue
                tally.cycles[way.name] += said.cycles
                if said == expected:
                    tally.finished += 1
                else:
                    tally.wrong.append(f"{way.name}: {difference(expected, said)}")


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
