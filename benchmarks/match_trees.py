"""Would verifying the matches of all text drafters as one tree pay, compared with the longest match alone?

    python -m benchmarks.match_trees --target build/models/smollm2

The target completes prompts plainly; the drafters are then replayed on its tokens, which coupled verification
would have committed in the same way. A cycle with r rows is taken to last 1 + c r of a plain one. Trees can
only gain where two matches differ; each node of a second match costs a row.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cluster import run_or_exit
from benchmarks.engine_worker import NoText
from benchmarks.peers.run import encode
from benchmarks.peers.stacks import running_stack
from benchmarks.prompts import CATEGORIES, load_tasks
from benchmarks.provenance import write_result
from gammaray.bench.measure import first_difference
from gammaray.bench.tables import plain_table
from gammaray.demo_pair import resolve_model
from gammaray.types import SamplingParams, VerificationMethod
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Match
from orchestrator.drafting.matches import TextDrafter
from orchestrator.drafting.prediction import PredictionDrafter
from orchestrator.drafting.prompt_lookup import PromptLookup
from orchestrator.drafting.suffix_decoding import SuffixDrafter
from orchestrator.text.tokenizer import Tokenizer

__all__ = ["Replay", "nodes_of", "replay"]

ROW_COSTS = (0.005, 0.05, 0.2)
"""Of a forward: about an H100's, a small GPU's, and this project's test machines'."""


@dataclass
class Replay:
    """Sums over the cycles of a replay."""

    cycles: int = 0
    tokens: int = 0
    rows: int = 0

    def speed(self, row_cost: float) -> float:
        """Return tokens per plain cycle's time."""
        return self.tokens / (self.cycles + row_cost * self.rows)


def nodes_of(matches: Sequence[Match]) -> int:
    """Return the nodes of the tree that has every match as a path."""
    return len({match.token_ids[:end] for match in matches for end in range(1, len(match.token_ids) + 1)})


def replay(
    prompt: Sequence[int], output: Sequence[int], texts: Sequence[TextDrafter], depth: int, *, as_tree: bool
) -> Replay:
    """Commit an output cycle by cycle with the longest match of each cycle, or with all of them as a tree."""
    params, coupled = SamplingParams(seed=0), VerificationMethod.COUPLED
    session = Session("replay", tuple(prompt), params, coupled, len(output), NoText())
    done, found = 0, Replay()
    while done < len(output):
        room = min(depth, len(output) - done - 1)
        looked_up = [text.look_up(session, room) for text in texts] if room > 0 else []
        matches = [match for match in looked_up if match is not None]
        if not as_tree and matches:
            matches = [max(matches, key=lambda match: match.length)]
        accepted = max((_agreeing(match.token_ids, output[done:]) for match in matches), default=0)
        session.token_ids += output[done : done + accepted + 1]
        done += accepted + 1
        found.cycles += 1
        found.tokens += accepted + 1
        found.rows += nodes_of(matches)
    return found


def _agreeing(proposed: Sequence[int], output: Sequence[int]) -> int:
    first = first_difference(proposed, output[: len(proposed)])
    return len(proposed) if first is None else first


async def _run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    tokenizer = Tokenizer(resolve_model(options.target, "target"))
    categories = tuple(options.categories.split(",")) if options.categories else ()
    tasks = load_tasks(categories or CATEGORIES, options.prompts)
    sums: dict[tuple[str, float], dict[bool, Replay]] = {}
    async with running_stack(options.target, None) as client:
        for task, prompt in zip(tasks, encode(tokenizer, tasks), strict=True):
            for temperature in (0.0, 1.0):
                output = await client.complete(
                    prompt,
                    max_tokens=options.tokens,
                    temperature=temperature,
                    seed=0,
                    gamma=0,
                    ignore_eos=True,
                    cache_salt=secrets.token_hex(8),
                )
                ids = [token.token_id for token in output.tokens]
                predicted = tokenizer.encode(task.prediction) if task.prediction else []
                for as_tree in (False, True):
                    texts: list[TextDrafter] = [SuffixDrafter(), PromptLookup()]
                    if predicted:
                        texts.insert(0, PredictionDrafter(predicted))
                    one = replay(prompt, ids, texts, options.depth, as_tree=as_tree)
                    for name in (task.category, "all"):
                        total = sums.setdefault((name, temperature), {}).setdefault(as_tree, Replay())
                        total.cycles += one.cycles
                        total.tokens += one.tokens
                        total.rows += one.rows
    rows = []
    title = "tokens per cycle and rows per cycle; tree over chain by row cost"
    columns = ("category", "T", "chain", "rows", "tree", "rows", *(f"x at {cost:g}" for cost in ROW_COSTS))
    table = plain_table(title, columns)
    for (name, temperature), by_kind in sorted(sums.items()):
        chain, tree = by_kind[False], by_kind[True]
        ratios = [tree.speed(cost) / chain.speed(cost) for cost in ROW_COSTS]
        cells = [f"{part / each.cycles:.2f}" for each in (chain, tree) for part in (each.tokens, each.rows)]
        table.add_row(name, f"{temperature:g}", *cells, *(f"{ratio:.3f}" for ratio in ratios))
        rows.append(
            {
                "category": name,
                "temperature": temperature,
                "chain": vars(chain),
                "tree": vars(tree),
                "tree_over_chain": dict(zip(map(str, ROW_COSTS), ratios, strict=True)),
            }
        )
    console.print(table)
    settings = {name: str(value) for name, value in vars(options).items() if name != "out"}
    return {"settings": settings, "rows": rows}


def main() -> None:
    """Run the comparison and write its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", required=True, help="model directory")
    parser.add_argument("--categories", default="", help="comma-separated; default: all")
    parser.add_argument("--prompts", type=int, default=3, help="per category")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, default=8, help="tokens of a match at most")
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args()
    console = Console()
    result = run_or_exit(_run(options, console))
    console.print(f"written: {write_result('match-trees', result, options.out)}")


if __name__ == "__main__":
    main()
