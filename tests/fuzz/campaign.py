"""One run of the fuzzer: its clock, its dice, and what it has seen."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Iterator

__all__ = ["Campaign"]

MAX_KEPT = 200


class Campaign:
    """Counts answers and keeps what was wrong.

    Args:
        seconds: How long to go on.
        seed: Of every choice; each fuzzer has dice of its own, see `dice`.

    Attributes:
        counts: Answers by (surface, result).
        wrong: The first things that must not happen, in words.
        num_wrong: How many there were.
    """

    def __init__(self, seconds: float, seed: int) -> None:
        self._ends_at, self._seed = time.monotonic() + seconds, seed
        self.counts: Counter[tuple[str, str]] = Counter()
        self.wrong: deque[str] = deque(maxlen=MAX_KEPT)
        self.num_wrong = 0

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._ends_at

    @property
    def left_s(self) -> float:
        """Seconds until the time is up."""
        return max(0.0, self._ends_at - time.monotonic())

    def rounds(self) -> Iterator[int]:
        """Yield numbers until the time is up, and one at least: however slow the machine is."""
        yield 0
        for number in itertools.count(1):
            if self.is_over:
                return
            yield number

    def dice(self, name: str) -> random.Random:
        """Return the generator of one fuzzer: independent of how fast the others are."""
        return random.Random(f"{self._seed}/{name}")

    def count(self, surface: str, result: str, wrong: str | None = None) -> None:
        """Note an answer, and what was wrong with it if anything was."""
        self.counts[surface, result] += 1
        if wrong is not None:
            self.blame(f"{surface}: {wrong}")

    def blame(self, wrong: str) -> None:
        """Note something that must not happen."""
        self.num_wrong += 1
        if len(self.wrong) < MAX_KEPT:
            self.wrong.append(wrong)

    async def guard(self, name: str, work: Awaitable[None]) -> None:
        """Await a fuzzer; that it ends with an error is a finding too, or a bug of its own."""
        try:
            await work
        except Exception as error:
            self.blame(f"{name} broke: {type(error).__name__}: {error}")

    def table(self) -> str:
        """Return the counts as text."""
        surfaces = sorted({surface for surface, _ in self.counts})
        lines = []
        for surface in surfaces:
            found = sorted((n, result) for (its, result), n in self.counts.items() if its == surface)
            told = ", ".join(f"{result} {n}" for n, result in reversed(found))
            lines.append(f"{surface:14} {sum(n for n, _ in found):6}  {told}")
        return "\n".join(lines)
