"""Drafters of one target in one table: acceptance by position, time, memory, speedup.

    python -m benchmarks.drafters.compare --draft demo --draft demo@int8 --draft early-exit:4
    python -m benchmarks.drafters.compare --target build/models/smollm2 --draft benchmarks/drafters/smollm2

`DRAFT@int8` and `DRAFT@int4` quantise a draft. Each is measured as by `gammaray qualify --error 0`: the
schedulers of the workers in one process and thread, without a cluster or a network, so that a cluster reaches
less. The demo target continues Python code, others are asked the chat tasks of `benchmarks/prompts`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.draft_weights import WEIGHTS, weight_bytes
from benchmarks.prompts import load_tasks
from benchmarks.provenance import write_result
from benchmarks.workloads import prompts
from gammaray.bench.tables import plain_table
from gammaray.bench.workloads import fingerprint
from gammaray.demo_pair import resolve_model
from gammaray.errors import GammarayError, InvalidArgumentError
from gammaray.qualify.judgement import Payoff, judge
from gammaray.qualify.measured import PairFacts, QualifyTask
from gammaray.qualify.process import measure_pairs
from orchestrator.text.tokenizer import Tokenizer
from services.qualify.models import find, load

__all__ = ["compare", "row", "split_draft", "texts_for"]

TEMPERATURES = (0.0, 1.0)


def split_draft(text: str) -> tuple[str, str]:
    """Return a draft and its weights, "auto" without `@`.

    Raises:
        InvalidArgumentError: Unknown weights.
    """
    name, at, weights = text.rpartition("@")
    if at and weights not in WEIGHTS:
        raise InvalidArgumentError("draft", text, f"after @ one of {', '.join(WEIGHTS)}")
    return (name, weights) if at else (text, "auto")


def texts_for(target: str, count: int) -> list[str]:
    """Return prompts: `count` chat tasks of each category, or for the demo pair `count` pieces of code."""
    if target == "demo":
        return prompts("code", count)
    tokenizer = Tokenizer(resolve_model(target, "target"))
    return [tokenizer.render_chat(task.messages) for task in load_tasks(count=count)]


def compare(drafts: Sequence[str], task: QualifyTask, console: Console) -> list[dict[str, Any]]:
    """Measure each draft and return a row for it.

    Raises:
        InvalidArgumentError: There is no such model.
        GammarayError: A model failed.
    """
    rows = []
    for text in drafts:
        name, weights = split_draft(text)
        own = task.model_copy(update={"drafts": (name,), "draft_weights": weights})
        with console.status(text) as status:
            (pair,) = measure_pairs(own, status.update)
        loaded = load(find("draft", name, own, find("target", task.target, own)))
        assert loaded.engine is not None
        rows.append(row(text, pair, weight_bytes(loaded.engine)))
    return rows


def row(name: str, pair: PairFacts, num_bytes: int) -> dict[str, Any]:
    """Return what the table says about a draft."""
    judgement = judge(pair)
    return {
        "draft": name,
        "weight_mb": num_bytes / 1e6,
        "fitness": judgement.fitness.value,
        "reasons": judgement.reasons,
        "equal": [equality.model_dump() for equality in pair.equality],
        "payoffs": [_payoff(payoff) for payoff in judgement.payoffs],
    }


def _payoff(payoff: Payoff) -> dict[str, Any]:
    best = payoff.best
    return {
        "temperature": payoff.temperature,
        "alpha_by_position": payoff.by_position,
        "plain_ms": payoff.plain_ms,
        "draft_pass_ms": payoff.draft_step_ms,
        "gamma": best.gamma,
        "draft_ms": best.draft_ms,
        "tokens_per_cycle": best.tokens_per_cycle,
        "speedup": best.speedup,
    }


def _print(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    headings = ("draft", "MB", "T", "alpha by position", "pass, ms", "best gamma", "proposal, ms")
    headings += ("tok/cycle", "S")
    table = plain_table("Drafters; S is over plain decoding, without network", headings)
    for line in rows:
        for payoff in line["payoffs"]:
            table.add_row(
                line["draft"],
                f"{line['weight_mb']:.1f}",
                f"{payoff['temperature']:g}",
                " ".join(f"{alpha:.2f}" for alpha in payoff["alpha_by_position"]),
                f"{payoff['draft_pass_ms']:.2f} of {payoff['plain_ms']:.2f}",
                str(payoff["gamma"]),
                f"{payoff['draft_ms']:.2f}",
                f"{payoff['tokens_per_cycle']:.2f}",
                f"{payoff['speedup']:.2f}",
            )
    console.print(table)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="demo", help="as for `gammaray qualify`")
    parser.add_argument("--draft", action="append", required=True, help="repeatable; DRAFT[@int8|@int4]")
    parser.add_argument("--prompts", type=int, default=1, help="chat tasks per category, or pieces of code")
    parser.add_argument("--tokens", type=int, default=96, help="of each completion")
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--json", type=Path, help="result file; omitted: a new one in benchmarks/results")
    given = parser.parse_args()
    console = Console()
    texts = texts_for(given.target, given.prompts)
    task = QualifyTask(
        target=given.target,
        drafts=(),
        prompts=tuple(texts),
        max_tokens=given.tokens,
        gammas=tuple(given.gammas),
        temperatures=TEMPERATURES,
        threads=1,
    )
    try:
        rows = compare(given.draft, task, console)
    except GammarayError as error:
        sys.exit(f"compare: {error}")
    _print(console, rows)
    result = {
        "target": given.target,
        "prompts": {"count": len(texts), "sha256": fingerprint(texts)},
        "tokens": given.tokens,
        "gammas": task.gammas,
        "rows": rows,
    }
    console.print(f"written: {write_result('drafters', result, given.json)}")


if __name__ == "__main__":
    main()
