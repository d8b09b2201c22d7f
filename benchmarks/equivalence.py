"""Losslessness, token for token, through the whole cluster.

    python -m benchmarks.equivalence

- Temperature 0: the tokens equal those of `transformers` `generate(do_sample=False)` on the same target.
- Temperature 1, coupled: for one seed the tokens are the same with gamma 0, 3, 8 and adaptive, without a
  drafter, with another drafter, and with eight requests at once.

Prints counts and the first difference (prompt:token), writes them with their provenance; exits with 1 when a
token differs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.baselines import Baselines, running_baselines
from benchmarks.cluster import connected, run_or_exit
from benchmarks.provenance import write_result
from benchmarks.workloads import WORKLOADS, fingerprint, prompts
from gammaray import AsyncClient
from gammaray.bench.measure import first_difference
from gammaray.bench.tables import plain_table
from gammaray.client.request import GenerateOptions
from gammaray.demo_pair import DEMO_PAIR, resolve_model

__all__ = ["compare_at_once", "compare_greedy", "compare_sampled", "plain_sampled"]

Tokens = tuple[int, ...]
Variants = dict[str, GenerateOptions]

_AT_ONCE = 8
_VARIANTS: Variants = {
    "gamma 3": {"gamma": 3},
    "gamma 8": {"gamma": 8},
    "adaptive": {"gamma": "adaptive"},
    "no drafter": {"drafter": "none"},
}


async def compare_greedy(
    client: AsyncClient, baselines: Baselines, texts: Sequence[str], max_tokens: int
) -> list[dict[str, Any]]:
    """Compare greedy completions, gamma adaptive and 8, with those of `generate`."""
    expected = []
    for text in texts:
        made = await baselines.generate("generate", text, max_tokens=max_tokens, ignore_eos=False)
        expected.append(made.token_ids)
    counts = []
    for name in ("adaptive", "gamma 8"):
        got = [await _tokens(client, t, max_tokens, temperature=0.0, **_VARIANTS[name]) for t in texts]
        counts.append(_count(f"temperature 0, {name} = generate", got, expected))
    return counts


async def plain_sampled(client: AsyncClient, texts: Sequence[str], max_tokens: int) -> list[Tokens]:
    """Return the completions of gamma 0 at temperature 1, each prompt with its own seed."""
    return [await _sampled(client, texts, i, max_tokens, gamma=0) for i in range(len(texts))]


async def compare_sampled(
    client: AsyncClient, texts: Sequence[str], max_tokens: int, expected: Sequence[Tokens], variants: Variants
) -> list[dict[str, Any]]:
    """Compare completions at temperature 1 under several options with `expected`."""
    counts = []
    for name, options in variants.items():
        got = [await _sampled(client, texts, i, max_tokens, **options) for i in range(len(texts))]
        counts.append(_count(f"temperature 1, {name} = gamma 0", got, expected))
    return counts


async def compare_at_once(
    client: AsyncClient, texts: Sequence[str], max_tokens: int, expected: Sequence[Tokens]
) -> dict[str, Any]:
    """Compare completions at temperature 1, eight requests in flight, with `expected`."""
    got: list[Tokens] = []
    for start in range(0, len(texts), _AT_ONCE):
        batch = range(start, min(start + _AT_ONCE, len(texts)))
        got += await asyncio.gather(*(_sampled(client, texts, i, max_tokens) for i in batch))
    return _count(f"temperature 1, adaptive, {_AT_ONCE} at once = gamma 0", got, expected)


async def _sampled(
    client: AsyncClient, texts: Sequence[str], i: int, max_tokens: int, **options: Any
) -> Tokens:
    return await _tokens(client, texts[i], max_tokens, temperature=1.0, seed=i, **options)


async def _tokens(client: AsyncClient, text: str, max_tokens: int, **options: Any) -> Tokens:
    made = await client.complete(text, max_tokens=max_tokens, verification="coupled", **options)
    return tuple(token.token_id for token in made.tokens)


def _count(name: str, got: Sequence[Tokens], expected: Sequence[Tokens]) -> dict[str, Any]:
    different = [
        {"prompt": i, "token": first_difference(ours, theirs)}
        for i, (ours, theirs) in enumerate(zip(got, expected, strict=True))
        if ours != theirs
    ]
    return {
        "comparison": name,
        "completions": len(got),
        "equal": len(got) - len(different),
        "tokens": sum(len(tokens) for tokens in expected),
        "different": different,
    }


def _table(counts: Sequence[dict[str, Any]]) -> Table:
    columns = ("comparison", "equal", "tokens", "differs")
    table = plain_table("Completions with the same tokens", columns)
    for count in counts:
        first = count["different"][0] if count["different"] else None
        where = f"{first['prompt']}:{first['token']}" if first else ""
        equal = f"{count['equal']} of {count['completions']}"
        table.add_row(count["comparison"], equal, str(count["tokens"]), where)
    return table


async def _run(options: argparse.Namespace, texts: Sequence[str]) -> list[dict[str, Any]]:
    size = options.tokens
    async with (
        running_baselines(options.target, options.draft) as baselines,
        connected("--target", options.target, "--draft", options.draft) as client,
    ):
        counts = await compare_greedy(client, baselines, texts, size)
        expected = await plain_sampled(client, texts, size)
        counts += await compare_sampled(client, texts, size, expected, _VARIANTS)
        counts.append(await compare_at_once(client, texts, size, expected))
    # The target as its own draft: another drafter, one whose proposals are nearly always wholly accepted.
    itself = resolve_model(options.target, "target")
    async with connected("--target", options.target, "--draft", itself) as client:
        variants: Variants = {"gamma 3, another drafter": {"gamma": 3}}
        return counts + await compare_sampled(client, texts, size, expected, variants)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Losslessness, token for token.")
    parser.add_argument("--target", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--draft", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--workload", choices=WORKLOADS, default="mixed")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=128, help="upper bound per completion")
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args()
    texts = prompts(options.workload, options.prompts)
    counts = run_or_exit(_run(options, texts))
    Console().print(_table(counts))
    result = {
        "settings": {key: value for key, value in vars(options).items() if key != "out"},
        "workload_fingerprint": fingerprint(texts),
        "comparisons": counts,
    }
    print(f"written: {write_result('equivalence', result, options.out)}")
    sys.exit(any(count["different"] for count in counts))


if __name__ == "__main__":
    main()
