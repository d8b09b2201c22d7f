"""Drafting against plain decoding, as a whole: what the sessions of a replica get of either, in turn.

The cost model tells what a proposal costs its own session and the target's batch. It cannot tell what
drafting takes from everybody where machines are shared: the cores of a drafter beside a target's, the
orchestrator's own time, a link. All of that shows when all sessions stop drafting together for a while. So
under load they do, now and then, and the one of the two that gives more tokens per second is what is played.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.cycle.types import Cycle

__all__ = ["Contest"]

SETTLE, MEASURED = 4, 16
"""Cycles of a round that are left out, as others are still under way from before, and those that count."""

LEAST_CYCLES = 64
"""Cycles of all sessions together that a round has at least: tokens per cycle vary by half."""

LEAST_SESSIONS = 1.5
"""Sessions at once from which on there is a contest: a lone one takes time from nobody."""

SAME_LOAD = 0.25
"""Rounds are compared when the sessions at once differ by at most this share."""

OPENING, PLAIN_TO_SEE = 3, 0.25
"""Comparisons before there is a winner; one is enough when it is ahead by so much."""

RETRY_SHARE = 0.005
"""Share of the time that trying the loser again may cost."""

LEAST_GAP = 8
"""Rounds of the winner between two of the loser, however little it loses; fewer after fewer comparisons, for
drafting gets better while its costs are learned."""

RATE = 0.25
"""Weight of the last comparison in the mean, once there are as many as that says."""


@dataclass
class _Standing:
    """What is known at one load: the mean logarithm of drafting's speed over plain decoding's."""

    advantage: float = 0.0
    num_compared: int = 0
    num_won: int = 0

    @property
    def is_plain_better(self) -> bool:
        return self.advantage < 0.0

    @property
    def is_open(self) -> bool:
        return self.num_compared < OPENING and (self.num_compared == 0 or abs(self.advantage) < PLAIN_TO_SEE)

    @property
    def gap(self) -> float:
        """Rounds of the winner between two of the loser."""
        lost = 1.0 - math.exp(-abs(self.advantage))
        return max(lost / RETRY_SHARE, min(self.num_compared, LEAST_GAP))

    def compared(self, advantage: float) -> None:
        self.num_compared += 1
        self.advantage += (advantage - self.advantage) * max(RATE, 1.0 / self.num_compared)

    def next_is_plain(self, was_plain: bool) -> bool:
        """Return whether the next round is plain; the loser's turn lasts one round."""
        if self.is_open:
            return not was_plain
        self.num_won = self.num_won + 1 if was_plain == self.is_plain_better else 0
        return self.is_plain_better == (self.num_won < self.gap)


@dataclass(frozen=True)
class _Round:
    is_plain: bool
    sessions: float
    tokens_per_s: float


class Contest:
    """Rounds of drafting and of plain decoding, for all adaptive sessions of a replica at once.

    With several replicas each one decides by what its own sessions get.

    Attributes:
        is_plain: Whether all of them are to decode plainly at present.
    """

    def __init__(self) -> None:
        self.is_plain = False
        self._standings: dict[int, _Standing] = {}
        self._last: _Round | None = None
        self._begin(0.0)

    def _begin(self, now: float, *, is_settled: bool = False) -> None:
        self._began_at, self._is_settled = now, is_settled
        self._num_cycles, self._num_tokens, self._seconds = 0, 0, 0.0

    def observe(self, cycle: Cycle) -> None:
        """Count a finished cycle of an adaptive session; may end the round."""
        if cycle.is_first or cycle.total_s <= 0:
            return
        self._num_cycles += 1
        self._num_tokens += cycle.num_accepted + 1
        self._seconds += cycle.total_s
        now = cycle.started + cycle.total_s
        elapsed = now - self._began_at
        lengths = elapsed * self._num_cycles / self._seconds  # of a mean cycle
        if not self._is_settled:
            if lengths >= SETTLE:
                self._begin(now, is_settled=True)
        elif lengths >= MEASURED and self._num_cycles >= LEAST_CYCLES:
            self._end(_Round(self.is_plain, self._seconds / elapsed, self._num_tokens / elapsed), now)

    def _end(self, done: _Round, now: float) -> None:
        before, self._last = self._last, done
        self._begin(now)
        if done.sessions < LEAST_SESSIONS:
            self.is_plain, self._last = False, None
            return
        standing = self._standings.setdefault(round(math.log2(done.sessions)), _Standing())
        if before is not None and before.is_plain != done.is_plain and _is_same_load(before, done):
            advantage = math.log(done.tokens_per_s / before.tokens_per_s)
            standing.compared(-advantage if done.is_plain else advantage)
        self.is_plain = standing.next_is_plain(self.is_plain)


def _is_same_load(one: _Round, other: _Round) -> bool:
    return abs(math.log(one.sessions / other.sessions)) <= SAME_LOAD
