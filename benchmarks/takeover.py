"""What the acceptance counts of a session's handover are worth to its next owner, in simulation.

    python -m benchmarks.takeover

A session runs 64 cycles with one owner and continues with another one: once with the acceptance counts of the
first owner, once without. The next owner's replica is new, or has served sessions of another acceptance: then
its own statistics are the prior of the session. Everything else, random numbers included, is the same.

Figures are expected tokens per second in the first cycles after the takeover: the ratio of with to without,
and the shares of the oracle's, which knows acceptance and costs and always uses the best chain.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.provenance import write_result
from benchmarks.regret import MAX_GAMMA
from benchmarks.simulation import Lone, drive
from benchmarks.worlds import World, candidates
from gammaray.bench.tables import plain_table
from orchestrator.gamma.adaptive import AdaptiveGamma
from orchestrator.gamma.cost_model import CostModel

__all__ = ["main"]

ALPHAS = (0.3, 0.6, 0.8, 0.9, 0.95)
"""Acceptance of the session, and of the sessions that its next replica has served."""

COSTS = tuple(itertools.product((0.05, 0.15), (0.02, 0.1)))
"""Draft forward and row, in target forwards."""

BEFORE, SERVED, NUM_SERVED = 64, 50, 6
"""Cycles with the first owner; cycles of each session that the next replica has served, and their number."""

AFTER = (8, 16, 32, 64)
"""Cycles after the takeover at which the figures are taken."""


def resume(world: World, fleet_alpha: float | None, seed: int, *, recalls: bool) -> list[float]:
    """Return tokens per unit in the first cycles after a takeover, at each of `AFTER`.

    Args:
        world: World of the session.
        fleet_alpha: Acceptance of the sessions that the next replica has served; None: it is new.
        seed: Seed of all random numbers.
        recalls: Whether the next owner gets the acceptance counts.
    """
    former = AdaptiveGamma(MAX_GAMMA, CostModel(random.Random(2000 + seed)))
    drive(former, world, BEFORE, Lone(random.Random(3000 + seed)))
    costs = CostModel(random.Random(1000 + seed))
    if fleet_alpha is not None:
        for number in range(NUM_SERVED):
            other = AdaptiveGamma(MAX_GAMMA, costs)
            lone = Lone(random.Random(100 * seed + number))
            drive(other, replace(world, alpha=fleet_alpha), SERVED, lone)
    controller = AdaptiveGamma(MAX_GAMMA, costs)
    if recalls:
        controller.acceptance.recall(*former.acceptance.counts)
    lone, tokens, units, speeds = Lone(random.Random(seed)), 0.0, 0.0, []
    for start, end in itertools.pairwise((0, *AFTER)):
        run = drive(controller, world, end - start, lone, is_new=False)
        tokens, units = tokens + run.tokens, units + run.units
        speeds.append(tokens / units)
    return speeds


def measure(seeds: int) -> list[dict[str, Any]]:
    """Return a row per kind of replica: new, and by the difference of acceptance."""
    found: dict[str, list[tuple[list[float], list[float], float]]] = {}
    cases = list(itertools.product(ALPHAS, (None, *ALPHAS), COSTS, range(seeds)))
    for alpha, fleet_alpha, (draft, per_token), seed in track(cases, transient=True):
        world = World(alpha=alpha, draft=draft, per_token=per_token)
        best = world.speed(world.best(candidates(MAX_GAMMA, 0)))
        both = [resume(world, fleet_alpha, seed, recalls=recalls) for recalls in (True, False)]
        found.setdefault(_kind(alpha, fleet_alpha), []).append((both[0], both[1], best))
    return [_row(kind, runs) for kind, runs in sorted(found.items())]


def _kind(alpha: float, fleet_alpha: float | None) -> str:
    if fleet_alpha is None:
        return "new replica"
    apart = abs(alpha - fleet_alpha)
    return f"alpha differs by {'0' if apart == 0 else '0.05 to 0.2' if apart < 0.25 else '0.3 to 0.65'}"


def _row(kind: str, runs: Sequence[tuple[list[float], list[float], float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"replica": kind, "num_runs": len(runs), "after": {}}
    for index, cycles in enumerate(AFTER):
        ratios = [recalled[index] / fresh[index] for recalled, fresh, _ in runs]
        row["after"][str(cycles)] = {
            "ratio": statistics.mean(ratios),
            "standard_error": statistics.stdev(ratios) / len(ratios) ** 0.5,
            "best_ratio": max(ratios),
            "worst_ratio": min(ratios),
            "with": statistics.mean(recalled[index] / best for recalled, _, best in runs),
            "without": statistics.mean(fresh[index] / best for _, fresh, best in runs),
        }
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, print a table, write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=4, help="runs per world")
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args(argv)
    rows = measure(options.seeds)
    table = plain_table(
        "After a takeover: tokens per second with over without the acceptance counts (shares of the oracle)",
        ("next replica", *(f"first {cycles} cycles" for cycles in AFTER)),
    )
    for row in rows:
        cells = [
            f"{at['ratio']:.3f} ± {at['standard_error']:.3f} ({at['with']:.3f}, {at['without']:.3f})"
            for at in row["after"].values()
        ]
        table.add_row(row["replica"], *cells)
    Console(width=160).print(table)
    result = {"settings": {"seeds": options.seeds, "before": BEFORE}, "rows": rows}
    print(f"written: {write_result('takeover', result, options.out)}")


if __name__ == "__main__":
    main()
