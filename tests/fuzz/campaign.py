"""One run of the fuzzer: its time, its random choices, and its findings."""

import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Iterator, Sequence

MAX_KEPT = 200


class Campaign:
    """Counts responses and records violations."""

    def __init__(self, seconds: float, seed: int) -> None:
        self.begin(seconds, seed)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.wrong: deque[str] = deque(maxlen=MAX_KEPT)
        self.num_wrong = 0

    def begin(self, seconds: float, seed: int) -> None:
        """Begin the next part of the run, which has its own time and choices."""
        self._ends_at, self._seed = time.monotonic() + seconds, seed

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._ends_at

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends_at - time.monotonic())

    def rounds(self) -> Iterator[int]:
        """Yield numbers until the time is up, at least one on any machine."""
        yield 0
        for number in itertools.count(1):
            if self.is_over:
                return
            yield number

    def dice(self, name: str) -> random.Random:
        """Return the generator of one fuzzer, independent of the speed of the others."""
        return random.Random(f"{self._seed}/{name}")

    def count(self, surface: str, result: str, wrong: str | None = None) -> None:
        self.counts[surface, result] += 1
        if wrong is not None:
            self.blame(f"{surface}: {wrong}")

    def blame(self, wrong: str) -> None:
        self.num_wrong += 1
        if len(self.wrong) < MAX_KEPT:
            self.wrong.append(wrong)

    async def guard(self, name: str, work: Awaitable[None]) -> None:
        """Await a fuzzer; an error of the fuzzer is recorded as a violation."""
        try:
            await work
        except Exception as error:
            self.blame(f"{name} broke: {type(error).__name__}: {error}")

    def __str__(self) -> str:
        wrong = [f"WRONG ({self.num_wrong}):", *self.wrong]
        return "\n".join([self.table(), "", *(wrong if self.num_wrong else ["clean"])])

    def table(self) -> str:
        rows = []
        for surface in sorted({surface for surface, _ in self.counts}):
            found = sorted((n, result) for (its, result), n in self.counts.items() if its == surface)
            results = ", ".join(f"{result} {n}" for n, result in reversed(found))
            rows.append((surface, str(sum(n for n, _ in found)), results))
        return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines, whose cells stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )
