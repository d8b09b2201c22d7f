"""Endless streams, each with its expected completion."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gammaray import AsyncClient, RetryPolicy
from gammaray.errors import GammarayError, ResourceExhaustedError

__all__ = ["PROMPTS", "Ask", "Load", "Said", "Tally", "asks", "difference", "generate", "reference"]

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


@dataclass(frozen=True)
class Ask:
    """One requested completion, whose tokens depend on its fields only."""

    prompt: str
    temperature: float
    seed: int
    max_tokens: int


@dataclass(frozen=True)
class Said:
    """One completion: token ids and text."""

    token_ids: tuple[int, ...]
    text: str


def asks(count: int, max_tokens: int) -> list[Ask]:
    """Return asks, every second one greedy and the others sampled at temperature 1 (coupled)."""
    return [Ask(PROMPTS[i % len(PROMPTS)], float(i % 2), 1000 + i, max_tokens) for i in range(count)]


@dataclass
class Tally:
    """Outcomes of the streams.

    Attributes:
        finished: Streams that ended with the expected tokens and text.
        wrong: Descriptions of other completions.
        lost: Errors of streams that did not end.
        num_tokens: Tokens received.
        refused: Requests that were rejected before their first token, with a retry delay.
    """

    finished: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    num_tokens: int = 0
    refused: int = 0


async def generate(
    client: AsyncClient, ask: Ask, arrivals: list[float], tally: Tally | None = None, **how: Any
) -> Said:
    """Return one whole completion; add the arrival times of tokens to `arrivals`.

    The options in `how` (gamma, drafter) change no token. A salt of its own keeps a completion from finding
    its tokens in an earlier one's output, so that the draft workers are needed.
    """
    token_ids: list[int] = []
    text: list[str] = []
    options: dict[str, Any] = {"temperature": ask.temperature, "seed": ask.seed, "max_tokens": ask.max_tokens}
    options["cache_salt"] = secrets.token_hex(8)
    arrivals.append(time.monotonic())
    async for chunk in client.generate(ask.prompt, ignore_eos=True, **options, **how):
        if chunk.tokens:
            arrivals.append(time.monotonic())
        token_ids += (token.token_id for token in chunk.tokens)
        text.append(chunk.text)
        if tally is not None:
            tally.num_tokens += len(chunk.tokens)
    return Said(tuple(token_ids), "".join(text))


async def reference(address: str, wanted: Sequence[Ask]) -> dict[Ask, Said]:
    """Return the completions of an undisturbed cluster."""
    async with AsyncClient(address) as client:
        said = await asyncio.gather(*(generate(client, ask, []) for ask in wanted))
    return dict(zip(wanted, said, strict=True))


class Load:
    """One stream per ask, restarted when it ends; each is compared with the reference.

    Args:
        address: host:port of the gRPC API.
        expected: Completion of each ask.
        retry: Retry policy of the clients.

    Attributes:
        tally: Their outcomes.
        arrivals: By stream, the times of its start and of its tokens.
    """

    def __init__(self, address: str, expected: dict[Ask, Said], retry: RetryPolicy | None = None) -> None:
        self._address, self._expected, self._retry = address, expected, retry
        self.tally = Tally()
        self.arrivals: list[list[float]] = [[] for _ in expected]
        self._is_ending = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the streams."""
        streams = zip(self._expected, self.arrivals, strict=True)
        self._tasks = [asyncio.create_task(self._repeat(*stream)) for stream in streams]

    async def end(self, timeout_s: float) -> None:
        """Wait until the streams end; those that do not within `timeout_s` are lost."""
        self._is_ending = True
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
            self.tally.lost.append(f"no end within {timeout_s:g} s after the last strike")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def all_moved_since(self, moment: float) -> bool:
        """Whether every stream has received tokens since a time."""
        return all(times and times[-1] > moment for times in self.arrivals)

    def all_moved_between(self, first: float, last: float) -> bool:
        """Whether every stream received tokens between two times."""
        return all(any(first < time <= last for time in reversed(times)) for times in self.arrivals)

    async def _repeat(self, ask: Ask, arrivals: list[float]) -> None:
        async with AsyncClient(self._address, retry=self._retry) as client:
            while not self._is_ending:
                begun = len(arrivals)
                try:
                    said = await generate(client, ask, arrivals, self.tally)
                except GammarayError as error:
                    if isinstance(error, ResourceExhaustedError) and len(arrivals) == begun + 1:
                        self.tally.refused += 1
                        await asyncio.sleep(error.retry_after_s)
                        continue
                    self.tally.lost.append(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.5)  # it would fail again at once
                    continue
                if said == self._expected[ask]:
                    self.tally.finished += 1
                else:
                    self.tally.wrong.append(difference(self._expected[ask], said))


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
