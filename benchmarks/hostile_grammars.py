"""What hostile grammars of one tenant cost another one's stream.

    make smollm2
    python -m benchmarks.hostile_grammars --target build/models/smollm2

One stream is measured alone, beside callers who complete by an ordinary schema, and beside the same number of
callers who send grammars that are hard to compile or to follow, one after the other and never the same twice.
The three take turns. Exits with 1 if the stream's tokens differ, or a hostile call ends otherwise than with a
completion or a typed error.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cluster import run_or_exit, running_cluster
from benchmarks.provenance import write_result
from benchmarks.structured import SCHEMA
from gammaray import AsyncClient
from gammaray.bench.tables import plain_table
from gammaray.errors import GammarayError
from gammaray.grammar.texts import json_schema_grammar

PROMPT = "Tell me about the history of the bicycle."
NUM_TOKENS = 150
CALL_TOKENS = 200
_TIMEOUT_S = 120.0


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema if depth < 12 else True}}
    return schema


def _references(count: int) -> dict[str, Any]:
    names = [f"d{index}" for index in range(count)]
    return {
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in names],
        "$defs": {
            name: {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/{other}"}} for other in names]}
            for name in names
        },
    }


HOSTILE: Mapping[str, str] = {
    "ambiguous": 'start: a\na: "x" | a a | ""',
    "more ambiguous": 'start: a\na: b | a a | c\nb: "x" a | ""\nc: "x" | c c',
    "right-recursive": 'start: a\na: "x" a | "x" b\nb: "x" a | "y" | ""',
    "an expression with many states": "start: /(.*a.{20}b|.*c.{18}d|.*e.{15}f)*/",
    "an expression of counts": "start: /((a{1,100}b{1,100}){1,100}c?){1,100}/",
    "an intersection": "start: A\nA: /([ab]{10007})*c/ & /([ab]{10009})*c/",
    "intersected patterns": json_schema_grammar(
        {"type": "string", "allOf": [{"pattern": "^([ab]{1007})*c$"}, {"pattern": "^([ab]{1009})*c$"}]}
    ),
    "a large schema": json_schema_grammar(
        {
            "type": "object",
            "properties": {f"p{index}": {"type": "string", "maxLength": 99} for index in range(3000)},
            "required": [f"p{index}" for index in range(3000)],
        }
    ),
    "many optional properties": json_schema_grammar(
        {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(120)}}
    ),
    "schemas that refer to each other": json_schema_grammar(_references(40)),
    "a schema that doubles at each level": json_schema_grammar(_nested(11)),
    "a large enum": json_schema_grammar({"enum": [f"value {index}" for index in range(8000)]}),
    "a long text": json_schema_grammar({"type": "string", "minLength": 40_000, "maxLength": 50_000}),
    "nothing": "start: A\nA: /[^\\x00-\\U0010FFFF]/",
    "300 kB": "start: " + " | ".join(f'"{index:09d}"' for index in range(25_000)),
}
ORDINARY = json_schema_grammar(SCHEMA)


@dataclass
class Sums:
    """The stream in one kind of company."""

    speeds: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)

    def row(self) -> dict[str, Any]:
        """Return the figures, JSON-ready."""
        gaps = sorted(self.gaps_ms)
        return {
            "streams": len(self.speeds),
            "tokens_per_s": statistics.median(self.speeds),
            "gap_p50_ms": statistics.median(gaps),
            "gap_p99_ms": gaps[math.ceil(0.99 * len(gaps)) - 1],
            "gap_max_ms": gaps[-1],
            "calls": dict(sorted(self.calls.items())),
        }


async def _stream(client: AsyncClient, sums: Sums, salt: str) -> list[int]:
    token_ids: list[int] = []
    begun = last = 0.0
    asked = client.generate(
        PROMPT,
        max_tokens=NUM_TOKENS,
        temperature=0,
        ignore_eos=True,
        gamma=0,
        cache_salt=salt,
        timeout_s=_TIMEOUT_S,
    )
    async for chunk in asked:
        now = time.perf_counter()
        if chunk.tokens:
            if last:
                sums.gaps_ms.append(1000 * (now - last))
            begun, last = begun or now, now
            token_ids += [token.token_id for token in chunk.tokens]
    sums.speeds.append((len(token_ids) - 1) / (last - begun))
    return token_ids


async def _call(client: AsyncClient, name: str, grammar: str, calls: Counter[str]) -> None:
    try:
        made = await client.complete(PROMPT, max_tokens=CALL_TOKENS, grammar=grammar, timeout_s=_TIMEOUT_S)
    except GammarayError as error:
        calls[f"{name}: {type(error).__name__}"] += 1
    else:
        calls[f"{name}: {made.finish_reason.value}"] += 1


async def _company(client: AsyncClient, grammars: Callable[[], tuple[str, str]], calls: Counter[str]) -> None:
    while True:
        name, grammar = grammars()
        await _call(client, name, grammar, calls)


async def measure(client: AsyncClient, rounds: int, callers: int) -> tuple[dict[str, Sums], bool]:
    """Return the figures by kind of company, and whether all streams had the same tokens."""
    numbers = itertools.count()
    hostile = itertools.cycle(HOSTILE.items())

    def next_hostile() -> tuple[str, str]:
        name, grammar = next(hostile)
        return name, f"{grammar}\n// {next(numbers)}"

    kinds: dict[str, Callable[[], tuple[str, str]] | None] = {
        "alone": None,
        "ordinary schema": lambda: ("ordinary", ORDINARY),
        "hostile grammars": next_hostile,
    }
    sums = {kind: Sums() for kind in kinds}
    seen: set[tuple[int, ...]] = set()
    await _stream(client, Sums(), "warm-up")
    for number in range(rounds):
        for kind, grammars in kinds.items():
            company = []
            if grammars is not None:
                calls = sums[kind].calls
                company = [asyncio.create_task(_company(client, grammars, calls)) for _ in range(callers)]
            try:
                await asyncio.sleep(2)
                seen.add(tuple(await _stream(client, sums[kind], f"{kind} {number}")))
            finally:
                for task in company:
                    task.cancel()
                for task in company:
                    with suppress(asyncio.CancelledError):
                        await task
                await asyncio.sleep(2)
    # Every grammar is tried once to its end.
    for name, grammar in HOSTILE.items():
        await _call(client, name, f"{grammar}\n// last", sums["hostile grammars"].calls)
    return sums, len(seen) == 1


async def run(given: argparse.Namespace) -> tuple[dict[str, Sums], bool]:
    """Start a cluster and measure."""
    async with running_cluster("--target", given.target) as cluster:
        async with AsyncClient(cluster.grpc_address) as client:
            await client.wait_ready(60, roles=("target",))
            return await measure(client, given.rounds, given.callers)


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="build/models/smollm2", help="directory or hub name of a model")
    parser.add_argument("--rounds", type=int, default=5, help="streams of each kind; default 5")
    parser.add_argument("--callers", type=int, default=4, help="beside the stream; default 4")
    parser.add_argument("--out", type=Path, help="new result file; default: in benchmarks/results")
    given = parser.parse_args()
    sums, is_equal = run_or_exit(run(given))
    table = plain_table(
        f"A stream beside {given.callers} callers",
        ("company", "tokens/s", "gap p50, ms", "p99", "max", "calls"),
    )
    for kind, one in sums.items():
        row = one.row()
        figures = (f"{row[name]:.1f}" for name in ("tokens_per_s", "gap_p50_ms", "gap_p99_ms", "gap_max_ms"))
        table.add_row(kind, *figures, str(one.calls.total()))
    console = Console()
    console.print(table)
    console.print_json(json.dumps(sums["hostile grammars"].row()["calls"]))
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    rows = [{"company": kind, **one.row()} for kind, one in sums.items()]
    result = {"settings": settings, "rows": rows, "equal_tokens": is_equal}
    console.print(f"written: {write_result('hostile-grammars', result, given.out)}")
    if not is_equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
