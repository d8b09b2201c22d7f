"""What looking continuations up in known text is worth, without a draft model.

    python -m benchmarks.lookups --target build/models/smollm2

Completes the chat tasks of `benchmarks/prompts` by plain decoding and by each look-up, one prompt after the
other with the methods in turn, so that a change of the clock touches all. Three kinds of traffic:

- `tasks`: ten prompts per category, each seen for the first time.
- `again`: each of them asked a second time at once, with past outputs of the first.
- `agent`: one file edited in twenty turns, each of which shows the file and asks for the whole of it.

Speeds are ratios of time per token to plain decoding of the same prompt; their geometric means are printed.
Completions that repeat themselves (more than half of their 6-grams occurred before) are left out.
Exits with 1 if a completion's tokens are not those of plain decoding.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.cluster import run_or_exit, running_cluster
from benchmarks.prompts import AGENT, CATEGORIES, load_tasks
from benchmarks.provenance import write_result
from gammaray import AsyncClient
from gammaray.bench.loops import MAX_REPEATED, repeated_share
from gammaray.bench.tables import plain_table
from gammaray.client.request import GenerateOptions
from orchestrator.text.tokenizer import Tokenizer

MIN_TOKENS = 8
"""Shorter completions are left out: their times are noise."""


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        name: As printed.
        cluster: Index of the cluster that decodes.
        options: Of the request.
        sees_past: Whether past outputs may be looked up.
    """

    name: str
    cluster: int
    options: GenerateOptions
    sees_past: bool = False


@dataclass(frozen=True)
class Made:
    """One completion: `cycles` are its forwards of the target, `seconds` are per token after the first."""

    traffic: str
    prompt: str
    method: str
    temperature: float
    tokens: int
    cycles: int
    drafted: int
    seconds: float
    repeated: float
    is_equal: bool


async def complete(
    client: AsyncClient, method: Method, prompt: Sequence[int], temperature: float, max_tokens: int, salt: str
) -> tuple[list[int], int, int, float]:
    """Return a completion's tokens, cycles, drafted tokens, and seconds per token after the first."""
    tokens: list[int] = []
    first = last = 0.0
    in_first = cycles = drafted = 0
    async for chunk in client.generate(
        prompt, temperature=temperature, max_tokens=max_tokens, seed=7, cache_salt=salt, **method.options
    ):
        tokens += [token.token_id for token in chunk.tokens]
        last = time.perf_counter()
        if not first and tokens:
            first, in_first = last, len(tokens)
        if chunk.summary is not None:
            cycles, drafted = chunk.summary.cycles, chunk.summary.drafted_tokens
    return tokens, cycles, drafted, (last - first) / max(1, len(tokens) - in_first)


async def measure(
    clients: Sequence[AsyncClient],
    methods: Sequence[Method],
    prompts: Sequence[tuple[str, str, list[int]]],
    temperatures: Sequence[float],
    max_tokens: int,
) -> list[Made]:
    """Return one completion by prompt, method and temperature; two of tasks where past outputs are used."""
    made = []
    for number, (traffic, name, prompt) in enumerate(prompts):
        for temperature in temperatures:
            expected: list[int] = []
            for method in methods:
                # A salt of its own keeps a request from the outputs of others.
                salt = f"past {temperature}" if method.sees_past else f"{number} {time.time_ns()}"
                for kind in (traffic, "again") if method.sees_past and traffic == "tasks" else (traffic,):
                    tokens, cycles, drafted, seconds = await complete(
                        clients[method.cluster], method, prompt, temperature, max_tokens, salt
                    )
                    expected = expected or tokens
                    made.append(
                        Made(
                            kind,
                            name,
                            method.name,
                            temperature,
                            len(tokens),
                            cycles,
                            drafted,
                            seconds,
                            repeated_share(tokens),
                            tokens == expected,
                        )
                    )
        print(f"{traffic} {name}", file=sys.stderr)
    return made


def summarise(made: Sequence[Made], plain: Mapping[str, str]) -> list[dict[str, object]]:
    """Return per traffic, temperature and method the mean speed over plain decoding, and tokens per cycle.

    Args:
        made: The completions.
        plain: The plain method of each method, on the same cluster.
    """
    rows: list[dict[str, object]] = []
    reference = {(m.method, m.prompt, m.temperature): m.seconds for m in made}
    groups: dict[tuple[str, float, str], list[Made]] = {}
    for m in made:
        if m.repeated <= MAX_REPEATED and m.tokens > MIN_TOKENS and m.method in plain:
            groups.setdefault((m.traffic, m.temperature, m.method), []).append(m)
    for (traffic, temperature, method), found in groups.items():
        speeds = [math.log(reference[plain[method], m.prompt, m.temperature] / m.seconds) for m in found]
        speed = math.exp(statistics.fmean(speeds))
        rows.append(
            {
                "traffic": traffic,
                "temperature": temperature,
                "method": method,
                "completions": len(found),
                "speed": round(speed, 3),
                "standard_error": round(speed * statistics.stdev(speeds) / math.sqrt(len(speeds)), 3),
                "tokens_per_cycle": round(sum(m.tokens for m in found) / sum(m.cycles for m in found), 3),
                "drafted_per_cycle": round(sum(m.drafted for m in found) / sum(m.cycles for m in found), 3),
            }
        )
    return rows


@asynccontextmanager
async def clients_of(target: str, sources: Sequence[Path | None]) -> AsyncIterator[list[AsyncClient]]:
    """Run a cluster without draft workers from each source tree, and yield a client of each."""
    async with AsyncExitStack() as stack:
        found = []
        for source in sources:
            options = ("--target", target, "--draft-workers", "0")
            cluster = await stack.enter_async_context(running_cluster(*options, source=source))
            found.append(await stack.enter_async_context(AsyncClient(cluster.grpc_address)))
            await found[-1].wait_ready(60)
        yield found


async def run(options: argparse.Namespace) -> int:
    """Measure, print and write the result; return the exit status."""
    methods = [
        Method("plain", 0, {"gamma": 0}),
        Method("look-ups", 0, {}),
        Method("look-ups, past outputs", 0, {}, sees_past=True),
    ]
    plain = {method.name: "plain" for method in methods[1:]}
    if options.beside:
        methods += [Method("beside, plain", 1, {"gamma": 0}), Method("beside", 1, {})]
        plain["beside"] = "beside, plain"
    tokenizer = Tokenizer(str(options.target))
    tasks = [("tasks", task) for task in load_tasks(CATEGORIES, options.prompts)]
    agent = [("agent", task) for task in load_tasks((AGENT,))]
    prompts = [
        (traffic, task.id, list(tokenizer.encode(tokenizer.render_chat(task.messages))))
        for traffic, task in [*tasks, *agent]
    ]
    sources = [None, options.beside] if options.beside else [None]
    async with clients_of(str(options.target), sources) as clients:
        made = await measure(clients, methods, prompts, options.temperatures, options.max_tokens)
    rows = summarise(made, plain)
    columns = ("traffic", "T", "method", "n", "speed", "±", "tokens/cycle", "drafted/cycle")
    table = plain_table("Speed over plain decoding", columns)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    unequal = [m for m in made if not m.is_equal]
    print(f"{len(made)} completions, {len(unequal)} of them not plain decoding's")
    result = {"target": str(options.target), "rows": rows, "completions": [asdict(m) for m in made]}
    print(f"written to {write_result('lookups', result, options.out)}")
    return 1 if unequal else 0


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("build/models/smollm2"))
    parser.add_argument("--prompts", type=int, default=10, help="per category")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--beside", type=Path, help="another source tree, whose default is measured too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.beside = options.beside and options.beside.resolve()
    sys.exit(run_or_exit(run(options)))


if __name__ == "__main__":
    main()
