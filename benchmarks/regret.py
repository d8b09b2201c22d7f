"""The regret table of adaptive gamma: simulated worlds, the share of the oracle's speed that it reaches.

    python -m benchmarks.regret [--seeds 2] [--max-nodes 32]

The oracle knows acceptance and costs and plays the best shape for ever. Shares are of expected tokens per
second: in the first 200 cycles of a fresh replica whose drafter starts cold, and in the 400 after these.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.simulation import Lone, drive
from benchmarks.worlds import World, candidates
from gammaray.blocks import Shape
from orchestrator.control.adaptive import AdaptiveGamma
from orchestrator.control.costs import CostModel

__all__ = ["main", "regret"]

MAX_GAMMA = 8
GRID = list(itertools.product((0.3, 0.6, 0.8, 0.9), (0.05, 0.15, 0.4), (0.0, 0.1, 1.0), (0.005, 0.05, 0.3)))
COLUMNS = ("alpha", "rho", "network", "per token", "oracle", "x plain", "first 200", "then", "worst")


def regret(world: World, max_nodes: int, seeds: int) -> tuple[Shape, list[float], list[float]]:
    """Return the oracle's shape and, by seed, the shares in the first 200 and the next 400 cycles."""
    shape = world.best(candidates(MAX_GAMMA, max_nodes))
    first, then = [], []
    for seed in range(seeds):
        controller = AdaptiveGamma(MAX_GAMMA, CostModel(random.Random(1000 + seed)), max_nodes)
        session = Lone(random.Random(seed), cold_drafts=5)
        first.append(drive(controller, world, 200, session).speed / world.speed(shape))
        then.append(drive(controller, world, 400, session, is_new=False).speed / world.speed(shape))
    return shape, first, then


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2, help="runs per world")
    parser.add_argument("--max-nodes", type=int, default=0, help="bound of trees; 0: chains only")
    options = parser.parse_args(argv)
    table = Table(*COLUMNS)
    shares = []
    for alpha, draft, network, per_token in GRID:
        world = World(alpha=alpha, draft=draft, network=network, per_token=per_token)
        shape, first, then = regret(world, options.max_nodes, options.seeds)
        shares.append(statistics.mean(then))
        best = f"{shape.depth}" if shape.max_nodes <= shape.depth else f"{shape.depth}x{shape.max_nodes}"
        gain = world.speed(shape) / world.speed(Shape(0))
        numbers = (statistics.mean(first), shares[-1], min(then))
        table.add_row(
            *(f"{x:g}" for x in (alpha, draft, network, per_token)),
            best,
            f"{gain:.2f}",
            *(f"{number:.3f}" for number in numbers),
        )
    console = Console(width=100)
    console.print(table)
    tenth = sorted(shares)[len(shares) // 10]
    console.print(f"mean {statistics.mean(shares):.3f}, tenth {tenth:.3f}, worst world {min(shares):.3f}")


if __name__ == "__main__":
    main()
