"""Whether a crowd is served fairly: streams of several kinds at once, and newcomers among them.

    python -m benchmarks.crowd                # 512 streams, some two minutes on two cores
    python -m benchmarks.crowd --streams 64

Of ten streams two read slowly, two leave after a quarter of their tokens, one follows a grammar, and lengths
are 100 to 300 tokens. The model is that of `benchmarks.overhead`. A newcomer asks every second for a few
tokens. Gaps are those of streams that read at once. What is refused with 429 comes back after `Retry-After`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.cluster import run_or_exit
from benchmarks.overhead import MODEL, PROMPT, Load, make_model, percentiles, serving
from benchmarks.provenance import make_parser, settings_of, write_result

DEADLINE_S = 600.0
READ_S = 0.1
"""Of a slow reader, between two reads of at most `CHUNK` bytes."""

CHUNK = 2048
KINDS = ("slow", "slow", "leaves", "leaves", "grammar", "plain", "plain", "plain", "plain", "plain")
"""Of ten streams in a row."""

GRAMMAR = {"regex": "[a-z ]{400,}"}
NEWCOMER_TOKENS, NEWCOMER_S = 8, 1.0


@dataclass
class Seen:
    """What the clients saw.

    Attributes:
        gaps_s: By kind, seconds between reads that brought events.
        longest_s: By kind, the longest gap of each stream.
        first_s: By kind, seconds from each request to its first event.
        outcomes: How many streams of each kind ended how.
        refused: Answers 429.
    """

    gaps_s: dict[str, list[float]] = field(default_factory=dict)
    longest_s: dict[str, list[float]] = field(default_factory=dict)
    first_s: dict[str, list[float]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    refused: int = 0

    def note(self, kind: str, asked: float, arrivals: list[float]) -> None:
        """Add a stream."""
        gaps = [later - sooner for sooner, later in itertools.pairwise(arrivals)]
        self.gaps_s.setdefault(kind, []).extend(gaps)
        self.longest_s.setdefault(kind, []).append(max(gaps, default=0.0))
        self.first_s.setdefault(kind, []).append(arrivals[0] - asked)


async def stream(url: str, number: int, kind: str, max_tokens: int, seen: Seen) -> None:
    """Stream a completion as a client of this kind; come back if it is refused for now."""
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 1.0}
    body |= {"seed": number, "ignore_eos": kind != "grammar", "stream": True, "gammaray": {"gamma": 0}}
    if kind == "grammar":
        body["structured_outputs"] = GRAMMAR
    payload, address = json.dumps(body).encode(), urlsplit(url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    while True:
        asked = time.perf_counter()
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(
                f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload
            )
            answer = (await reader.readuntil(b"\r\n\r\n")).decode()
            if " 429 " not in answer.splitlines()[0]:
                arrivals, ended = await _read(reader, kind, max_tokens)
                break
        finally:
            writer.close()
        seen.refused += 1
        headers = dict(line.lower().split(": ", 1) for line in answer.splitlines()[1:] if line)
        await asyncio.sleep(float(headers["retry-after"]))
    seen.outcomes[f"{kind}: {ended}"] += 1
    seen.note(kind, asked, arrivals)


async def _read(reader: asyncio.StreamReader, kind: str, max_tokens: int) -> tuple[list[float], str]:
    """Return when events came, and how the stream ended."""
    arrivals, events, tail = [], 0, b""
    while True:
        chunk = await reader.read(CHUNK if kind == "slow" else 2**16)
        if not chunk:
            return arrivals, "whole" if b"[DONE]" in tail else f"cut: {tail[-200:]!r}"
        tail = (tail + chunk)[-400:]
        events += (found := chunk.count(b"data: {"))
        if found:
            arrivals.append(time.perf_counter())
        if kind == "leaves" and events >= max_tokens // 4:
            return arrivals, "left"
        if kind == "slow":
            await asyncio.sleep(READ_S)


async def measure(url: str, streams: int) -> dict[str, Any]:
    """Serve the crowd and its newcomers; return delays, outcomes and memory."""
    seen = Seen()
    memory = {"before": resident_mb()}

    async def one(number: int) -> None:
        await stream(url, number, KINDS[number % len(KINDS)], 100 * (1 + number // len(KINDS) % 3), seen)

    async def newcomers() -> None:
        for number in itertools.count(streams):
            await asyncio.sleep(NEWCOMER_S)
            await stream(url, number, "newcomer", NEWCOMER_TOKENS, seen)

    began = time.perf_counter()
    async with asyncio.timeout(DEADLINE_S):
        late = asyncio.create_task(newcomers())
        crowd = asyncio.gather(*map(one, range(streams)))
        await asyncio.sleep(2.0)
        memory["early"] = resident_mb()
        await crowd
        late.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await late  # raises what a newcomer met
    memory["after"] = resident_mb()
    reading = [gap for kind in ("plain", "grammar") for gap in seen.gaps_s[kind]]
    gaps = percentiles(reading)
    return {
        "streams": streams,
        "seconds": time.perf_counter() - began,
        "outcomes": dict(seen.outcomes),
        "refused": seen.refused,
        "gap_ms": gaps,
        "p99_over_median_gap": gaps["p99"] / gaps["p50"],
        "longest_gap_ms": {kind: 1e3 * max(longest) for kind, longest in seen.longest_s.items()},
        "first_event_ms": {kind: 1e3 * statistics.median(first) for kind, first in seen.first_s.items()},
        "newcomers": len(seen.first_s.get("newcomer", [])),
        "resident_mb": memory,
    }


def resident_mb() -> float:
    """Return the memory of all processes below this one."""
    children = psutil.Process().children(recursive=True)
    return sum(process.memory_info().rss for process in children if process.is_running()) / 2**20


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start a cluster and measure each number of streams; return the result, JSON-ready."""
    points = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / MODEL)
        async with serving(Load(0), model, options) as (url, _):
            await measure(url, 10)  # warms up
            for streams in options.streams:
                points.append(await measure(url, streams))
                print(json.dumps(points[-1], indent=1), flush=True)
    return {"settings": settings_of(options), "points": points}


def main() -> None:
    """Command line of this module."""
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=lambda text: [int(one) for one in text.split(",")], default=[512])
    options = parser.parse_args()
    options.target_ms = None
    print(f"written: {write_result('crowd', run_or_exit(run(options)), options.out)}")


if __name__ == "__main__":
    main()
