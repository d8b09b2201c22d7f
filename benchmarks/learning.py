"""What a head learns from live traffic of a domain that it was not trained on.

    python -m benchmarks.learning --minutes 15

Serves a target with its head and `--learn`, first a few chat prompts, then only questions
for SQL, each of which is new. One client waits `--idle` times as long as its last completion took before it
sends the next request, so that the cluster serves about a third of what it could. Only the head drafts,
`--gamma` tokens per cycle.

Printed are the tokens that it gets accepted per cycle, by minute, with the versions that were published and
what became of them, and the gaps between pieces of a stream. Then each stream is completed again at gamma 0.
Exits with 1 if a token differs. `--beside` sends the same requests to a second cluster, which does not learn,
in turn, and compares the gaps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cluster import at_once, run_or_exit, running_cluster
from benchmarks.prompts import load_tasks
from benchmarks.provenance import make_parser, write_result
from gammaray import AsyncClient
from gammaray.bench.svg import bar_chart
from gammaray.bench.systems import Ask, Stack
from gammaray.bench.tables import plain_table
from gammaray.learning.folder import OPEN, DrafterFolder, LearningFolder
from orchestrator.text.tokenizer import Tokenizer

_TABLES = {
    "orders": ("customer_id", "total", "placed_at", "status"),
    "employees": ("name", "salary", "hired_on", "department_id"),
    "books": ("title", "author_id", "published", "pages"),
    "flights": ("origin", "destination", "departs_at", "seats"),
    "patients": ("name", "born_on", "ward_id", "doctor_id"),
    "tracks": ("title", "album_id", "seconds", "plays"),
    "readings": ("sensor_id", "value", "taken_at", "unit"),
    "invoices": ("supplier_id", "amount", "due_on", "paid"),
}
_TASKS = (
    "list {0} and {1} of all rows of the table {table} where {2} is not null, the newest {3} first",
    "count the rows of {table} by {0}, and keep the groups of more than {number}",
    "find the {number} rows of {table} with the largest {1}, with {0} and {2}",
    "update {2} of the rows of {table} whose {0} is {number}",
    "return the average, least and largest {1} of {table} for each {3}",
    "join {table} with a table of details by {0} and return {1} and {2}",
    "create the table {table} with the columns {0}, {1}, {2} and {3}, suitable types and a primary key",
    "delete the rows of {table} whose {3} is older than {number} days",
)


@dataclass(frozen=True)
class Stream:
    """One completion of the learning cluster or of the other one."""

    at: float
    stable: int
    is_learning: bool
    domain: str
    prompt: list[int]
    seed: int
    temperature: float
    tokens: list[int]
    cycles: int
    accepted: int
    seconds: float
    gaps: list[float]


def questions(seed: int) -> Iterator[str]:
    """Yield questions for SQL, each once, in random order."""
    rng = random.Random(seed)
    places = list(itertools.product(_TABLES, _TASKS, range(2, 12)))
    rng.shuffle(places)
    for table, task, number in places:
        columns = rng.sample(_TABLES[table], 4)
        task = task.format(*columns, table=table, number=number)
        yield f"Write an SQL query to {task}. Explain it briefly."


async def stream(
    client: AsyncClient, prompt: Sequence[int], options: argparse.Namespace, **about: Any
) -> Stream:
    """Complete one prompt."""
    stack = Stack(options.gamma, client, options={"drafter": "head"})
    given = {"temperature": about["temperature"], "seed": about["seed"], "ignore_eos": False}
    sample = await stack.sample(Ask(tuple(prompt), options.tokens, **given))
    assert sample.summary is not None
    return Stream(
        prompt=list(prompt),
        tokens=list(sample.token_ids),
        cycles=sample.summary.cycles,
        accepted=sample.summary.accepted_tokens,
        seconds=sample.seconds,
        gaps=[later - at for (at, _), (later, _) in itertools.pairwise(sample.arrivals)],
        **about,
    )


async def serve(
    clients: Sequence[AsyncClient], tokenizer: Tokenizer, options: argparse.Namespace, learned: DrafterFolder
) -> list[Stream]:
    """Send the requests, to each cluster in turn, and return the streams."""
    made: list[Stream] = []
    began, count = time.perf_counter(), 0

    async def ask(domain: str, text: str) -> None:
        nonlocal count
        prompt = list(tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}])))
        count += 1
        for is_learning in (True, False)[: len(clients)]:
            at = time.perf_counter() - began
            found = await stream(
                clients[not is_learning],
                prompt,
                options,
                at=at,
                stable=learned.read().stable,
                is_learning=is_learning,
                domain=domain,
                seed=count,
                temperature=float(count % 2),
            )
            made.append(found)
            await asyncio.sleep(options.idle * found.seconds)

    for task in load_tasks(("chat",), options.chats):
        await ask("chat", str(task.messages[-1]["content"]))
    began = time.perf_counter()
    for question in itertools.cycle(questions(1)):
        if time.perf_counter() - began > 60 * options.minutes:
            return made
        await ask("sql", question)
    return made


def rate(streams: Sequence[Stream]) -> float:
    """Return accepted tokens per cycle."""
    return sum(one.accepted for one in streams) / max(1, sum(one.cycles for one in streams))


def p99(streams: Sequence[Stream]) -> float:
    """Return the 99th percentile of the gaps between pieces, in milliseconds."""
    gaps = [gap for one in streams for gap in one.gaps]
    return 1000 * statistics.quantiles(gaps, n=100)[98] if len(gaps) > 1 else 0.0


async def differing(client: AsyncClient, made: Sequence[Stream], options: argparse.Namespace) -> int:
    """Return how many streams are not those of gamma 0, four of which are completed at once."""

    async def differs(number: int) -> bool:
        one = made[number]
        again = await client.complete(
            one.prompt, temperature=one.temperature, seed=one.seed, max_tokens=options.tokens, gamma=0
        )
        return [token.token_id for token in again.tokens] != one.tokens

    return sum(await at_once(len(made), 4, differs))


def by_minute(sql: Sequence[Stream]) -> list[dict[str, Any]]:
    """Return the accepted tokens per cycle of each minute, and the stable version at its end."""
    minutes = []
    for minute in range(int(sql[-1].at // 60) + 1):
        found = [one for one in sql if minute == one.at // 60]
        ours = [one for one in found if one.is_learning]
        if ours:
            others = [one for one in found if not one.is_learning]
            row = {"minute": minute, "streams": len(ours), "learning": round(rate(ours), 3)}
            minutes.append(row | {"other": round(rate(others), 3), "stable": ours[-1].stable})
    return minutes


def chart(minutes: Sequence[dict[str, Any]], chat: float) -> str:
    """Return the accepted tokens per cycle by minute as SVG; the line is what chats had before."""
    versions = [0, *(row["stable"] for row in minutes)]
    groups = [
        f"{row['minute']}" + (f" v{new}" if new != old else "")
        for row, old, new in zip(minutes, versions, versions[1:], strict=False)
    ]
    series = {"not learning": [row["other"] or None for row in minutes]}
    series["learning (vN: version N serves)"] = [row["learning"] for row in minutes]
    title = "Accepted tokens per cycle by minute of SQL questions; dashed: chats before"
    return bar_chart(title, groups, series, base=chat)


async def run(options: argparse.Namespace) -> int:
    """Measure, print and write the result; return the exit status."""
    tokenizer = Tokenizer(str(options.target))
    target, drafter = str(options.target), str(options.head)
    common = ("--engine", options.engine, "--target", target, "--head", drafter)
    common += ("--draft-weights", options.weights)
    with tempfile.TemporaryDirectory() as folder:
        learned = LearningFolder(Path(folder)).store(OPEN)
        async with AsyncExitStack() as stack:
            clients = []
            sides = (("--learn", folder), ())[: 1 + options.beside]
            for learn in reversed(sides) if options.last else sides:
                cluster = await stack.enter_async_context(running_cluster(*common, *learn))
                clients.append(await stack.enter_async_context(AsyncClient(cluster.grpc_address)))
                await clients[-1].wait_ready(60)
            if options.last:
                clients.reverse()
            made = await serve(clients, tokenizer, options, learned)
            drafters = learned.read()
            differ = await differing(clients[-1], made, options)
    sql = [one for one in made if one.domain == "sql"]
    minutes = by_minute(sql)
    table = plain_table(
        "Accepted tokens per cycle", ("minute", "streams", "learning", "not", "stable version")
    )
    for row in minutes:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    chat = rate([one for one in made if one.domain == "chat" and one.is_learning])
    tails = [p99([one for one in sql if one.is_learning is side]) for side in (True, False)]
    print(f"chat {chat:.3f}; p99 of gaps {tails[0]:.1f} ms, not learning {tails[1]:.1f} ms")
    for version in drafters.versions:
        expected = f"expects {version.expected}, its parent {version.parent_expected}"
        print(f"version {version.number}: {version.status} {version.reason}, {expected}")
    print(f"{len(made)} streams, {differ} of them differ from gamma 0")
    result = {
        "target": target,
        "drafter": drafter,
        "chat": chat,
        "minutes": minutes,
        "p99_ms": tails,
        "streams": len(made),
        "different": differ,
        "drafters": drafters.model_dump(mode="json"),
        "completions": [asdict(one) | {"prompt": len(one.prompt), "tokens": len(one.tokens)} for one in made],
    }
    for one in result["completions"]:
        one["gaps_ms"] = " ".join(f"{1000 * gap:.1f}" for gap in one.pop("gaps"))  # on one line
    if options.chart:
        options.chart.write_text(chart(minutes, chat))
    print(f"written to {write_result('learning', result, options.out)}")
    return 1 if differ else 0


def main() -> None:
    """Parse the command line and run."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", type=Path, default=Path("build/models/smollm2"))
    parser.add_argument("--head", type=Path, default=Path("benchmarks/heads/smollm2"))
    parser.add_argument("--engine", default="auto", help="of the target; vllm wants --weights auto")
    parser.add_argument("--weights", default="int8", help="of the drafter, see --draft-weights")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--chats", type=int, default=10, help="chat prompts before the domain changes")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--idle", type=float, default=2.0)
    parser.add_argument("--beside", action="store_true", help="a second cluster that does not learn")
    parser.add_argument(
        "--last", action="store_true", help="start the cluster that learns after the other one"
    )
    parser.add_argument("--chart", type=Path, help="SVG to write")
    sys.exit(run_or_exit(run(parser.parse_args())))


if __name__ == "__main__":
    main()
