"""What clients got during an event of a run, such as a fault or an upgrade, and the report."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.network.histories import Clients, errors_of
from tests.chaos.pauses import WINDOW_S

PROGRESS_S = 30.0
"""After an event every stream gets a token again within this, or it counts as a violation."""


@dataclass(frozen=True)
class Result:
    """What clients got during an event; seconds.

    Attributes:
        streams: Requests that it met.
        lost, repeated, changed: Those whose tokens were.
        errors: Typed errors that ended requests, by type.
        pause_s: Longest time without a token of any stream.
        back_s: From its end until every stream had a token.
    """

    name: str
    streams: int
    lost: int
    repeated: int
    changed: int
    errors: dict[str, int]
    pause_s: float
    back_s: float


@dataclass
class Measured:
    """Outcome of a run."""

    results: list[Result]
    violations: list[str]
    requests: int
    finished: int
    errors: dict[str, int]
    seconds: float
    usual_pause_s: float


@dataclass(frozen=True)
class Span:
    """When an event began and ended, and when all streams had tokens again."""

    name: str
    began: float
    ended: float
    back: float


async def progress(clients: Clients, moment: float) -> float:
    """Return when every stream had a token since a time; gives up after a while."""
    while not clients.all_moved_since(moment) and time.monotonic() < moment + PROGRESS_S + 5:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    first = (next((time for time in times if time > moment), time.monotonic()) for times in clients.arrivals)
    return max(first)


def longest_pause(clients: Clients, began: float, ended: float) -> float:
    """Return the longest time without a token in a span, of any stream."""
    longest = 0.0
    for times in clients.arrivals:
        inside = [time for time in times if began < time < ended]
        longest = max(longest, *(b - a for a, b in itertools.pairwise([began, *inside, ended])))
    return longest


def result_of(span: Span, clients: Clients) -> Result:
    met = [
        one
        for one in clients.histories
        if one.begun_at < span.back and not (one.ended_at and one.ended_at < span.began)
    ]
    kinds = Counter(one.kind for one in met)
    return Result(
        name=span.name,
        streams=len(met),
        lost=kinds["lost"],
        repeated=kinds["repeated"],
        changed=kinds["changed"],
        errors=dict(errors_of(met)),
        pause_s=longest_pause(clients, span.began, span.back + WINDOW_S),
        back_s=span.back - span.ended,
    )


def line(result: Result) -> str:
    errors = ", ".join(f"{count} {name}" for name, count in result.errors.items()) or "none"
    return (
        f"{result.name}: {result.streams} streams, {result.lost} lost, {result.repeated} repeated, "
        f"{result.changed} changed, typed errors: {errors}; pause {result.pause_s:.2f} s, "
        f"all had tokens {result.back_s:.2f} s after it"
    )


def table(outcome: Measured) -> str:
    head = ("event", "streams", "lost", "repeated", "changed", "errors", "longest pause", "back after")
    rows = [head]
    for name in sorted({one.name for one in outcome.results}):
        same = [one for one in outcome.results if one.name == name]
        sums = (sum(getattr(one, key) for one in same) for key in ("streams", "lost", "repeated", "changed"))
        errors = sum(sum(one.errors.values()) for one in same)
        pause, back = max(one.pause_s for one in same), max(one.back_s for one in same)
        rows.append((name, *map(str, sums), str(errors), f"{pause:.2f} s", f"{back:.2f} s"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    errors = ", ".join(f"{count} {name}" for name, count in outcome.errors.items()) or "none"
    return "\n".join(
        [
            *lines,
            "",
            f"{len(outcome.results)} events in {outcome.seconds:.0f} s: {outcome.requests} requests, "
            f"{outcome.finished} with all tokens of plain decoding; typed errors: {errors}; "
            f"longest pause before the first {outcome.usual_pause_s:.2f} s",
            *(f"violation: {one}" for one in outcome.violations),
        ]
    )


def measured(spans: Sequence[Span], clients: Clients, seconds: float, usual_pause_s: float) -> Measured:
    """Return what a run measured, once its clients have ended."""
    unmoved = [span for span in spans if span.back - span.ended > PROGRESS_S]
    return Measured(
        results=[result_of(span, clients) for span in spans],
        violations=clients.violations()
        + [f"{span.name}: no progress within {PROGRESS_S:g} s after it" for span in unmoved],
        requests=len(clients.histories),
        finished=sum(not one.error and not one.wrong for one in clients.histories),
        errors=dict(errors_of(clients.histories)),
        seconds=seconds,
        usual_pause_s=usual_pause_s,
    )
