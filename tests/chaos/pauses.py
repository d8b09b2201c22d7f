"""Pauses of the streams after each strike, and the recovery time of the victim."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WINDOW_S = 0.5
"""A pause that begins this long after a strike is still its doing."""

SETTLE_S = 0.3
"""Tokens that were under way when something was struck come within this."""


@dataclass
class Event:
    """A strike that was carried out.

    Attributes:
        label: Target and action.
        at: Time on the monotonic clock.
        killed: Roles of the processes that were killed.
        stop_s: Longest time that one of its processes was stopped.
        back_at: Time at which replacements of all killed processes served; None if unknown.
        pauses_s: Pause of each stream.
        is_calm: Whether all streams received tokens just before, so that the pauses are due to this strike.
    """

    label: str
    at: float
    killed: tuple[str, ...] = ()
    stop_s: float = 0.0
    back_at: float | None = None
    pauses_s: tuple[float, ...] = ()
    is_calm: bool = True


@dataclass(frozen=True)
class Row:
    """One line of the table; times in seconds."""

    label: str
    strikes: int
    kills: int
    calm: int
    pause_median_s: float | None
    pause_max_s: float | None
    back_median_s: float | None
    back_max_s: float | None
    late_max_s: float | None
    stop_median_s: float


def pause_s(arrivals: Sequence[float], at: float, following: float = math.inf) -> float:
    """Return how long a stream paused because of an event at a time.

    This is its longest gap between tokens that overlaps the half second after the event, from the event on.

    Args:
        arrivals: Times of the stream's tokens.
        at: Time of the event.
        following: Time of the next event. A stream that received tokens before it, other than those that were
            under way, had recovered: what it waits from then on is due to the next event.
    """
    first = max(0, bisect.bisect_right(arrivals, at) - 1)
    last = bisect.bisect_right(arrivals, at + WINDOW_S)
    has_recovered = bisect.bisect_right(arrivals, at + SETTLE_S) < bisect.bisect_right(arrivals, following)
    end = following if has_recovered else math.inf
    times = [min(max(at, time), end) for time in arrivals[first : last + 1]]
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def usual_pause_s(arrivals: Iterable[Sequence[float]], at: float) -> float:
    return max(pause_s(times, at) for times in arrivals)


def rows(events: Sequence[Event]) -> list[Row]:
    return [
        _row(label, [e for e in events if e.label == label]) for label in sorted({e.label for e in events})
    ]


def _row(label: str, events: Sequence[Event]) -> Row:
    calm = [event for event in events if event.is_calm]
    worst = [max(event.pauses_s, default=0.0) for event in calm]
    back = [event.back_at - event.at for event in events if event.back_at is not None]
    late = [
        max(0.0, pause - (event.back_at - event.at))
        for event, pause in zip(calm, worst, strict=True)
        if event.back_at is not None
    ]
    return Row(
        label,
        len(events),
        sum(len(event.killed) for event in events),
        len(calm),
        statistics.median(worst) if worst else None,
        max(worst, default=None),
        statistics.median(back) if back else None,
        max(back, default=None),
        max(late, default=None),
        statistics.median(event.stop_s for event in events),
    )
