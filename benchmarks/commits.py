"""Two source trees in turn on one machine: did a change make gammaray slower?

    git worktree add ../before COMMIT
    python -m benchmarks.commits ../before

Runs a cluster of each tree with the packages of this environment, and sends every completion to one, then to
the other. Reported are tokens per second, and the time of a cycle beside its forwards where the draft model
proposes (gamma 4) and where nothing is proposed (gamma 0), as medians with their range: this tree over the
other one. Both clusters stay up, so that both have the machine's memory and noise.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from benchmarks.cluster import connected, run_or_exit
from benchmarks.provenance import write_result
from gammaray import AsyncClient
from gammaray.bench.tables import plain_table
from gammaray.bench.workloads import prompts
from gammaray.types import DrafterKind

__all__ = ["main"]

_HERE = Path(__file__).parents[1]
_NAMES = ("before", "after")
_GAMMAS: tuple[int | Literal["adaptive"], ...] = (0, 4, 8, "adaptive")
_TRACED = (0, 4)
_TRACE_DELAY_S = 0.3
"""Records of cycles reach the store after the completion."""
_SKIPPED_CYCLES = 2


@dataclass
class _Turn:
    """One repetition of all prompts by one tree."""

    tokens: int = 0
    seconds: float = 0.0
    beside_ms: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


_Key = tuple[float, int | str]
_Turns = dict[str, list[_Turn]]


async def _complete(client: AsyncClient, texts: Sequence[str], max_tokens: int, key: _Key) -> _Turn:
    temperature, gamma = key
    turn = _Turn()
    for seed, text in enumerate(texts):
        began, session_id = time.perf_counter(), ""
        async for chunk in client.generate(
            text,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            gamma=gamma,  # type: ignore[arg-type]
            ignore_eos=True,
            cache_salt=secrets.token_hex(8),  # each completion reads its prompt
        ):
            turn.tokens += len(chunk.tokens)
            session_id = chunk.session_id
        turn.seconds += time.perf_counter() - began
        if gamma in _TRACED:
            await asyncio.sleep(_TRACE_DELAY_S)
            turn.beside_ms += await _beside_ms(client, session_id, is_drafting=gamma != 0)
    return turn


async def _beside_ms(client: AsyncClient, session_id: str, *, is_drafting: bool) -> list[float]:
    """Return the milliseconds of each cycle without the workers' forwards."""
    cycles = (await client.session_trace(session_id))[_SKIPPED_CYCLES:]
    return [
        1e3
        * (cycle.total_s - sum(call.compute_s for call in (cycle.draft, cycle.target) if call is not None))
        for cycle in cycles
        if not is_drafting or cycle.drafter is DrafterKind.MODEL
    ]


async def _measure(options: argparse.Namespace) -> dict[_Key, _Turns]:
    found: dict[_Key, _Turns] = defaultdict(lambda: defaultdict(list))
    models = [f"--target={options.target}"] if options.target else []
    texts = prompts("prose", options.prompts)
    async with AsyncExitStack() as stack:
        trees = zip(_NAMES, (options.before.resolve(), _HERE), strict=True)
        clients = [
            (name, await stack.enter_async_context(connected(*models, source=tree))) for name, tree in trees
        ]
        for repetition in range(options.repetitions + 1):  # the first one warms up
            for temperature in (0.0, 1.0):
                for gamma in _GAMMAS:
                    for name, client in clients if repetition % 2 else reversed(clients):
                        turn = await _complete(client, texts, options.tokens, (temperature, gamma))
                        if repetition > 0:
                            found[temperature, gamma][name].append(turn)
    return found


def _row(key: _Key, turns: _Turns) -> dict[str, Any]:
    """Return the ratios of one point; every repetition is one ratio."""
    pairs = list(zip(*(turns[name] for name in _NAMES), strict=True))
    row: dict[str, Any] = {"temperature": key[0], "gamma": key[1]}
    row["tokens_per_s"] = {n: statistics.median(t.tokens_per_s for t in turns[n]) for n in _NAMES}
    row["speed_ratios"] = [after.tokens_per_s / before.tokens_per_s for before, after in pairs]
    if key[1] in _TRACED:
        beside = [tuple(statistics.median(turn.beside_ms) for turn in pair) for pair in pairs]
        row["beside_ms"] = {
            n: statistics.median(values) for n, values in zip(_NAMES, zip(*beside, strict=True), strict=True)
        }
        row["beside_ratios"] = [after / before for before, after in beside]
    return row


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _commit(tree: Path) -> str:
    """Return the commit of a source tree, marked if files differ from it."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="],
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    return said.stdout.strip()


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.commits", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", type=Path, help="source tree to compare with")
    parser.add_argument("--target", default="", help="default: the demo pair")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, help="new result file; default: in benchmarks/results")
    options = parser.parse_args()
    commits = {name: _commit(tree) for name, tree in zip(_NAMES, (options.before, _HERE), strict=True)}
    rows = [_row(key, turns) for key, turns in run_or_exit(_measure(options)).items()]
    table = plain_table(
        f"{commits['after']} over {commits['before']}",
        ("T", "gamma", "tokens/s before", "after", "speed", "beside forwards before (ms)", "after", "time"),
    )
    for row in rows:
        beside = row.get("beside_ms")
        table.add_row(
            f"{row['temperature']:g}",
            str(row["gamma"]),
            *(f"{row['tokens_per_s'][name]:.0f}" for name in _NAMES),
            _spread(row["speed_ratios"]),
            *(f"{beside[name]:.2f}" if beside else "" for name in _NAMES),
            _spread(row["beside_ratios"]) if beside else "",
        )
    Console().print(table)
    settings = {key: value for key, value in vars(options).items() if key not in ("before", "out")}
    result = {"commits": commits, "settings": settings, "rows": rows}
    print(f"written to {write_result('commits', result, options.out)}")


if __name__ == "__main__":
    main()
