"""What clients got during an event of a run, such as a strike, a fault or an upgrade, and the report."""

import asyncio
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.chaos.chaos_drafters import unused
from tests.chaos.clients import Clients, History
from tests.fuzz.campaign import columns

WINDOW_S = 0.5
"""A pause that begins this long after an event is still its doing."""


@dataclass(frozen=True)
class Result:
    """What clients got during an event; seconds."""

    name: str
    killed: tuple[str, ...]  # roles of the processes that it killed
    streams: int  # requests that it met
    wrong: int  # those whose tokens were others than plain decoding's
    errors: dict[str, int]  # typed errors that ended requests, by type
    pause_s: float  # longest time without a token of any stream
    back_s: float  # from its end until every stream had a token


@dataclass
class Measured:
    results: list[Result]
    violations: list[str]
    requests: int
    finished: int
    tokens: int
    errors: dict[str, int]
    cycles: dict[str, dict[str, int]]
    seconds: float
    usual_pause_s: float


@dataclass
class Span:
    """When an event began and ended, when all streams had tokens again, and what it killed."""

    name: str
    began: float
    ended: float
    killed: tuple[str, ...]
    back: float = 0.0


async def progress(clients: Clients, moment: float) -> float:
    """Return when every stream had a token since a time; gives up after a while."""
    latest = moment + clients.progress_s + 5
    while not clients.all_moved_since(moment) and time.monotonic() < latest:  # noqa: ASYNC110
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
    begun = [one for one in clients.histories if one.begun_at < span.back]
    met = [one for one in begun if not 0 < one.ended_at < span.began]
    wrong, pause_s = (
        sum(bool(one.wrong) for one in met),
        longest_pause(clients, span.began, span.back + WINDOW_S),
    )
    return Result(span.name, span.killed, len(met), wrong, _errors(met), pause_s, span.back - span.ended)


def line(result: Result) -> str:
    return (
        f"{result.name}: {result.streams} streams, {result.wrong} wrong, errors: {_counts(result.errors)}; "
        f"pause {result.pause_s:.2f} s, all had tokens {result.back_s:.2f} s after it"
    )


def table(outcome: Measured) -> str:
    rows = [("event", "streams", "wrong", "errors", "longest pause", "back after")]
    for name, same in _by_name(outcome):
        sums = (sum(getattr(one, key) for one in same) for key in ("streams", "wrong"))
        errors = sum(sum(one.errors.values()) for one in same)
        pause, back = max(one.pause_s for one in same), max(one.back_s for one in same)
        rows.append((name, *map(str, sums), str(errors), f"{pause:.2f} s", f"{back:.2f} s"))
    return "\n".join(
        [
            columns(rows),
            "",
            f"{len(outcome.results)} events in {outcome.seconds:.0f} s: {outcome.requests} requests, "
            f"{outcome.finished} with all tokens of plain decoding; "
            f"typed errors: {_counts(outcome.errors)}; "
            f"longest pause before the first {outcome.usual_pause_s:.2f} s",
            "cycles of the finished requests by drafter (fallback: the drafter was absent, failed or late):",
            *(f"{name}: {_counts(cycles)}" for name, cycles in outcome.cycles.items()),
            *(f"violation: {one}" for one in outcome.violations),
        ]
    )


def _by_name(outcome: Measured) -> Iterator[tuple[str, list[Result]]]:
    for name in sorted({one.name for one in outcome.results}):
        yield name, [one for one in outcome.results if one.name == name]


def _errors(histories: Sequence[History]) -> dict[str, int]:
    return dict(Counter(one.error for one in histories if one.error))  # `asdict` copies no Counter


def _counts(counted: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counted.items() if count) or "none"


def figures(outcome: Measured) -> dict[str, Any]:
    """Return the outcome as JSON, with what each kind of event cost."""
    recovery = [_recovery(name, same) for name, same in _by_name(outcome)]
    streams = {"finished": outcome.finished, "tokens": outcome.tokens}
    for kind, is_lost in (("lost", True), ("wrong", False)):
        streams[kind] = [one for one in outcome.violations if (": lost after" in one) is is_lost]
    counts = {key: sum(row[key] for row in recovery) for key in ("strikes", "kills")}
    return {**asdict(outcome), **counts, "streams": streams, "recovery": recovery}


def _recovery(label: str, same: Sequence[Result]) -> dict[str, Any]:
    pauses, back = [one.pause_s for one in same], [one.back_s for one in same]
    return {
        "label": label,
        "strikes": len(same),
        "kills": sum(len(one.killed) for one in same),
        "pause_median_s": statistics.median(pauses),
        "pause_max_s": max(pauses),
        "back_median_s": statistics.median(back),
        "back_max_s": max(back),
    }


def measured(spans: Sequence[Span], clients: Clients, seconds: float, usual_pause_s: float) -> Measured:
    """Return what a run measured, once its clients have ended."""
    allowed_s = clients.progress_s
    unmoved = [span for span in spans if span.back - span.ended > allowed_s]
    return Measured(
        results=[result_of(span, clients) for span in spans],
        violations=clients.violations()
        + [f"{span.name}: no progress within {allowed_s:g} s after it" for span in unmoved]
        + unused({stream.way: None for stream in clients.streams}, clients.cycles),
        requests=len(clients.histories),
        finished=sum(not one.error and not one.wrong for one in clients.histories),
        tokens=sum(one.num_tokens for one in clients.histories),
        errors=_errors(clients.histories),
        cycles={name: dict(cycles) for name, cycles in clients.cycles.items()},
        seconds=seconds,
        usual_pause_s=usual_pause_s,
    )
