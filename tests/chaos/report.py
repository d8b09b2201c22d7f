"""The result of a run as a table and as JSON."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.pauses import Row, rows
from tests.chaos.run import Options, Outcome

MAX_TRACEBACKS = 3
_RECORD = re.compile(r"^(?=[A-Z]+ \d{4}-)", re.MULTILINE)  # the start of a record in a log of Ray Serve

HEAD = (
    "victim",
    "strikes",
    "kills",
    "calm",
    "pause median",
    "max",
    "back median",
    "max",
    "pause after back",
    "stopped",
)


def table(outcome: Outcome) -> str:
    lines = [HEAD, *(_cells(row) for row in rows(outcome.events))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    tally = outcome.tally
    text += [
        "",
        "A pause is the longest gap between tokens of the stream that paused longest, after strikes that "
        "came while tokens flowed on all streams (calm);",
        f"while nothing happened the longest was {outcome.usual_pause_s:.2f} s.",
        "",
        f"{len(outcome.events)} strikes, {outcome.num_kills} kills in {outcome.seconds:.0f} s: "
        f"{tally.finished} streams finished ({tally.num_tokens} tokens), {len(tally.lost)} lost, "
        f"{len(tally.wrong)} with lost, repeated or changed tokens; {tally.refused} requests were refused "
        "before their first token and made again",
        "",
        "Cycles of the finished streams by drafter (fallback: the drafter was absent, failed or late):",
        *(f"{name}: {_counts(cycles)}" for name, cycles in tally.cycles.items()),
        *(f"unused: {name}" for name in outcome.unused),
        *(f"lost: {error}" for error in tally.lost),
        *(f"wrong: {difference}" for difference in tally.wrong),
    ]
    return "\n".join(text)


def tracebacks() -> str:
    """Return the last exceptions in the logs of this machine's clusters, whose directories end with them."""
    records = [
        record
        for path in Path(tempfile.gettempdir()).glob("gammaray-*/ray/session_latest/logs/serve/*.log")
        for record in _RECORD.split(path.read_text(errors="replace"))
        if "Traceback" in record
    ]
    return "\n".join(records[-MAX_TRACEBACKS:])


def figures(outcome: Outcome, options: Options) -> dict[str, Any]:
    tally = outcome.tally
    return {
        "options": asdict(options),
        "strikes": len(outcome.events),
        "kills": outcome.num_kills,
        "seconds": outcome.seconds,
        "streams": {
            "finished": tally.finished,
            "lost": tally.lost,
            "wrong": tally.wrong,
            "tokens": tally.num_tokens,
            "refused": tally.refused,
        },
        "cycles": tally.cycles,
        "unused": outcome.unused,
        "usual_pause_s": outcome.usual_pause_s,
        "recovery": [asdict(row) for row in rows(outcome.events)],
    }


def _counts(cycles: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in cycles.items() if count) or "none"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.label,
        str(row.strikes),
        str(row.kills),
        str(row.calm),
        *map(_seconds, (row.pause_median_s, row.pause_max_s, row.back_median_s, row.back_max_s)),
        _seconds(row.late_max_s),
        _seconds(row.stop_median_s or None),
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
