"""Two source trees in turn on one machine: did a change make gammaray slower?

    git worktree add ../before COMMIT
    python -m benchmarks.commits ../before
    python -m benchmarks.commits ../before --target MODEL_DIR --head HEAD --weights int8 --gammas 0,1,2

Runs a cluster of each tree with the packages of this environment, and sends every completion to one, then to
the other. Reported are tokens per second, and the overhead of a cycle (its time without the forwards) where
the draft model proposes (the fixed gammas) and where nothing is proposed (gamma 0): this tree over the other
one, as the geometric mean over repetitions with its 95 % interval. Both serve the same models at the same
time, on the same busy or idle machine: the demo pair, or a target with a head in its worker, which then
completes chat tasks of `benchmarks/prompts`.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from scipy.stats import t

from benchmarks.cluster import connected, run_or_exit
from benchmarks.peers.run import encode
from benchmarks.peers.stacks import cycles_of
from benchmarks.prompts import CATEGORIES, load_tasks
from benchmarks.provenance import make_parser, settings_of, write_result
from benchmarks.workloads import prompts
from gammaray import AsyncClient
from gammaray.bench.systems import Ask, Stack
from gammaray.bench.tables import plain_table
from gammaray.wire.cycles import CycleRecord
from orchestrator.text.tokenizer import Tokenizer

_HERE = Path(__file__).parents[1]
_NAMES = ("before", "after")
_SKIPPED_CYCLES = 2
_GIT_TIMEOUT_S = 30


@dataclass
class Turn:
    """One repetition of all prompts by one tree.

    Attributes:
        tokens: Tokens of the completions.
        seconds: Time of the completions.
        overhead_ms: Milliseconds of each traced cycle without its forwards.
    """

    tokens: int = 0
    seconds: float = 0.0
    overhead_ms: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, prompts included."""
        return self.tokens / self.seconds


Key = tuple[float, int | Literal["adaptive"]]
"""Temperature and gamma of a point."""

_Turns = dict[str, list[Turn]]

Prompt = str | tuple[int, ...]
"""Text or token ids."""


async def _complete(client: AsyncClient, texts: Sequence[Prompt], max_tokens: int, key: Key) -> Turn:
    temperature, gamma = key
    turn, stack = Turn(), Stack(gamma, client)
    for seed, text in enumerate(texts):
        sample = await stack.sample(Ask(text, max_tokens, temperature, seed))
        turn.tokens += len(sample.token_ids)
        turn.seconds += sample.seconds
        if gamma != "adaptive":
            cycles = (await cycles_of(client, sample))[_SKIPPED_CYCLES:]
            turn.overhead_ms += [_overhead_ms(one) for one in cycles if gamma == 0 or one.drafter.is_model]
    return turn


def _overhead_ms(cycle: CycleRecord) -> float:
    """Return the milliseconds of a cycle without the workers' forwards."""
    forwards = sum(call.compute_s for call in (cycle.draft, cycle.target) if call is not None)
    return 1e3 * (cycle.total_s - forwards)


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    if options.target is None:
        return list(prompts("prose", options.prompts))
    return list(encode(Tokenizer(options.target), load_tasks(CATEGORIES, options.prompts)))


def _serving(options: argparse.Namespace, tree: Path) -> AbstractAsyncContextManager[AsyncClient]:
    """Run a tree's cluster, which starts in the tree's folder; the client has its workers."""
    if options.target is None:
        return connected(source=tree)
    target, head = os.path.abspath(options.target), os.path.abspath(options.head)
    return connected(target, None, head, options.weights, source=tree)


def _gammas(text: str) -> tuple[int | Literal["adaptive"], ...]:
    return tuple("adaptive" if one == "adaptive" else int(one) for one in text.split(","))


async def _measure(options: argparse.Namespace) -> dict[Key, _Turns]:
    found: dict[Key, _Turns] = defaultdict(lambda: defaultdict(list))
    texts = _prompts(options)
    async with AsyncExitStack() as stack:
        trees = zip(_NAMES, (options.before.resolve(), _HERE), strict=True)
        clients = [(name, await stack.enter_async_context(_serving(options, tree))) for name, tree in trees]
        for repetition in range(options.repetitions + 1):  # the first one warms up
            for temperature in (0.0, 1.0):
                for gamma in options.gammas:
                    for name, client in clients if repetition % 2 else reversed(clients):
                        turn = await _complete(client, texts, options.tokens, (temperature, gamma))
                        if repetition > 0:
                            found[temperature, gamma][name].append(turn)
    return found


def compare(key: Key, turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Return the ratios of one point, "after" over "before"; every repetition is one ratio."""
    pairs = list(zip(*(turns[name] for name in _NAMES), strict=True))
    row: dict[str, Any] = {"temperature": key[0], "gamma": key[1]}
    row["tokens_per_s"] = {n: statistics.median(t.tokens_per_s for t in turns[n]) for n in _NAMES}
    row["speed_ratios"] = [after.tokens_per_s / before.tokens_per_s for before, after in pairs]
    if all(turn.overhead_ms for pair in pairs for turn in pair):
        overhead = [tuple(statistics.median(turn.overhead_ms) for turn in pair) for pair in pairs]
        row["overhead_ms"] = {
            n: statistics.median(values)
            for n, values in zip(_NAMES, zip(*overhead, strict=True), strict=True)
        }
        row["overhead_ratios"] = [after / before for before, after in overhead]
    return row


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios, and its 95 % interval by Student's t of their logarithms.

    Args:
        ratios: At least two, above zero.
    """
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def _spread(ratios: Sequence[float]) -> str:
    mean, low, high = interval(ratios)
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def _commit(tree: Path) -> str:
    """Return the commit of a source tree, marked if files differ from it; "unknown" without git."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=_GIT_TIMEOUT_S,
    )
    return said.stdout.strip() or "unknown"


def main() -> None:
    """Measure, print and write the result."""
    parser = make_parser(__doc__)
    parser.add_argument("before", type=Path, help="source tree to compare with")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repetitions", type=int, default=5, help="at least 2")
    parser.add_argument("--gammas", type=_gammas, default="0,4,8,adaptive", help="default 0,4,8,adaptive")
    parser.add_argument("--target", help="model directory; default: the demo pair")
    parser.add_argument("--head", help="with --target: directory of a head or draft model in its worker")
    parser.add_argument("--weights", default="auto", help="of the head: auto (default) or int8")
    options = parser.parse_args()
    if not (options.before / "gammaray").is_dir():
        parser.error(
            f"before: got {options.before}, allowed: a source tree of gammaray, such as a git worktree"
        )
    if options.repetitions < 2:
        parser.error(f"--repetitions: got {options.repetitions}, allowed: 2 or more")
    if (options.target is None) != (options.head is None):
        parser.error("--target and --head go together")
    commits = {name: _commit(tree) for name, tree in zip(_NAMES, (options.before, _HERE), strict=True)}
    rows = [compare(key, turns) for key, turns in run_or_exit(_measure(options)).items()]
    table = plain_table(
        f"{commits['after']} over {commits['before']}",
        ("T", "gamma", "tokens/s before", "after", "speed", "overhead before (ms)", "after", "overhead"),
    )
    for row in rows:
        overhead = row.get("overhead_ms")
        table.add_row(
            f"{row['temperature']:g}",
            str(row["gamma"]),
            *(f"{row['tokens_per_s'][name]:.0f}" for name in _NAMES),
            _spread(row["speed_ratios"]),
            *(f"{overhead[name]:.2f}" if overhead else "" for name in _NAMES),
            _spread(row["overhead_ratios"]) if overhead else "",
        )
    Console().print(table)
    settings = settings_of(options)
    del settings["before"]
    result = {"commits": commits, "settings": settings, "rows": rows}
    print(f"written to {write_result('commits', result, options.out)}")


if __name__ == "__main__":
    main()
