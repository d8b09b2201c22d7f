"""`gammaray bench` of a pair with a draft model, on a cluster that this program starts.

    python -m benchmarks.run            # some ten minutes; `make bench` without a real model
    python -m benchmarks.run --quick    # about a minute, to see that it works
    python -m benchmarks.run --target build/models/qwen2.5-coder-1.5b \
        --draft build/models/qwen2.5-coder-0.5b --draft-weights int8 --chat code,chat   # after `make qwen`

With `--in-target` the draft drafts in the target worker, in turn with it, instead of on a draft worker.
Exits with 1 when a token depends on gamma. `benchmarks.peers` compares with other programs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from rich.console import Console

from benchmarks.cluster import connected, run_or_exit
from benchmarks.prompts import CATEGORIES, load_tasks
from benchmarks.provenance import make_parser, write_result
from benchmarks.workloads import WORKLOADS, tasks
from gammaray import AsyncClient
from gammaray.bench.run import BenchSettings, run_bench
from gammaray.bench.tables import show_point
from gammaray.demo_pair import DEMO_PAIR, resolve_model
from orchestrator.text.tokenizer import Tokenizer

_GAMMAS = ("2", "4", "6", "8", "4x12", "6x16", "adaptive")
_QUICK_GAMMAS = ("4", "4x12", "adaptive")


def chat_prompts(target: str, categories: Sequence[str], count: int) -> list[tuple[str, str]]:
    """Return the first `count` prompts of each category, by the target's chat template, after its name."""
    tokenizer = Tokenizer(resolve_model(target, "target"))
    found = load_tasks(categories, count)
    return [(task.category, tokenizer.render_chat(task.messages)) for task in found]


async def run(
    cluster: AbstractAsyncContextManager[AsyncClient],
    settings: BenchSettings,
    found: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Start the cluster, and return the result, JSON-ready.

    Raises:
        ClusterError: The cluster did not start, or did not end all of its processes.
        GammarayError: A completion failed.
    """
    console = Console()
    console.print("starting the cluster ...")
    async with cluster as client:
        return await run_bench(
            client, settings, found, lambda: None, lambda point: show_point(console, point)
        )


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def main() -> None:
    """Command line of this module."""
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a small run")
    parser.add_argument("--target", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--draft", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--draft-weights", choices=("auto", "int8"), default="auto")
    parser.add_argument("--in-target", action="store_true", help="the draft is in the target worker")
    parser.add_argument("--workload", choices=WORKLOADS, default="mixed")
    parser.add_argument("--chat", type=_list, help=f"instead of it, some of {','.join(CATEGORIES)}")
    parser.add_argument("--prompts", type=int, help="number of prompts; with --chat, of each category")
    parser.add_argument("--gammas", type=_list)
    parser.add_argument("--temperatures", type=_list, default=("0", "0.7", "1"))
    parser.add_argument("--tokens", type=int, help="tokens per completion")
    parser.add_argument("--repetitions", type=int)
    options = parser.parse_args()
    quick = options.quick
    settings = BenchSettings(
        workload=",".join(options.chat) if options.chat else options.workload,
        max_tokens=options.tokens or (32 if quick else 128),
        repetitions=options.repetitions or (2 if quick else 5),
        gammas=options.gammas or (_QUICK_GAMMAS if quick else _GAMMAS),
        temperatures=tuple(map(float, options.temperatures)),
    )
    count = options.prompts or (2 if quick else 6)
    if options.chat:
        found = chat_prompts(options.target, options.chat, count)
    else:
        found = tasks(options.workload, count)
    draft, head = (None, options.draft) if options.in_target else (options.draft, None)
    cluster = connected(options.target, draft, head, options.draft_weights)
    result = run_or_exit(run(cluster, settings, found)) | {"in_target": options.in_target}
    print(f"written: {write_result('run', result, options.out)}")
    equalities = [point["equality"] for point in result["points"]]
    sys.exit(any(equality["compared"] != equality["equal"] for equality in equalities))


if __name__ == "__main__":
    main()
