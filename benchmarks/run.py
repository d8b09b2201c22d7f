"""`gammaray bench` of a pair with a draft model, on a cluster that this program starts.

    python -m benchmarks.run            # some ten minutes; `make bench` without a real model
    python -m benchmarks.run --quick    # about a minute, to see that it works

Exits with 1 when a token depends on gamma. `benchmarks.peers` compares with other programs.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

from benchmarks.cluster import connected, run_or_exit
from benchmarks.provenance import make_parser, write_result
from benchmarks.workloads import WORKLOADS, tasks
from gammaray.bench.run import BenchSettings, run_bench
from gammaray.bench.tables import show_point
from gammaray.demo_pair import DEMO_PAIR

_GAMMAS = ("2", "4", "6", "8", "4x12", "6x16", "adaptive")
_QUICK_GAMMAS = ("4", "4x12", "adaptive")


async def run(target: str, draft: str, settings: BenchSettings, num_prompts: int) -> dict[str, Any]:
    """Start the cluster, and return the result, JSON-ready.

    Raises:
        ClusterError: The cluster did not start, or did not end all of its processes.
        GammarayError: A completion failed.
    """
    console, found = Console(), tasks(settings.workload, num_prompts)
    console.print("starting the cluster ...")
    async with connected(target, draft) as client:
        return await run_bench(
            client, settings, found, lambda: None, lambda point: show_point(console, point)
        )


def main() -> None:
    """Command line of this module."""
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a small run")
    parser.add_argument("--target", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--draft", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--workload", choices=WORKLOADS, default="mixed")
    parser.add_argument("--prompts", type=int, help="number of prompts")
    parser.add_argument("--tokens", type=int, help="tokens per completion")
    parser.add_argument("--repetitions", type=int)
    options = parser.parse_args()
    quick = options.quick
    settings = BenchSettings(
        workload=options.workload,
        max_tokens=options.tokens or (32 if quick else 128),
        repetitions=options.repetitions or (2 if quick else 5),
        gammas=_QUICK_GAMMAS if quick else _GAMMAS,
        temperatures=(0.0, 0.7, 1.0),
    )
    num_prompts = options.prompts or (2 if quick else 6)
    result = run_or_exit(run(options.target, options.draft, settings, num_prompts))
    print(f"written: {write_result('run', result, options.out)}")
    equalities = [point["equality"] for point in result["points"]]
    sys.exit(any(equality["compared"] != equality["equal"] for equality in equalities))


if __name__ == "__main__":
    main()
