"""How well a draft worker knows what drafting gains, in simulation: its estimate against the truth.

    python -m benchmarks.gain

A session drafts chains of four in each of the 108 worlds of `benchmarks.regret`. The truth is the difference
of expected tokens per second with chains of four and with plain decoding; the estimate uses what the draft
worker observes, see `services.speculation.gain`. Both are in units of the speed of plain decoding.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.provenance import write_result
from benchmarks.regret import GRID
from benchmarks.worlds import World
from gammaray.bench.tables import plain_table
from gammaray.blocks import Shape
from gammaray.types import Proposal
from services.speculation.gain import GainMeter

SHAPE, PLAIN = Shape(4), Shape(0)
UNIT_S = 4e-3
CYCLES = 500


def estimate(world: World, seed: int) -> float:
    """Return the tokens per unit of time that a draft worker takes for its gain."""
    rng, meter = random.Random(seed), GainMeter()
    proposal = Proposal(token_ids=tuple(range(1, SHAPE.depth + 1)))
    now, tokens = 0.0, [0]
    for _ in range(CYCLES):
        # Messages to and from the drafter are outside of what it sees.
        answered = now + world.forwards_s(SHAPE) * _noise(world, rng) * UNIT_S
        meter.sent("s", proposal, len(tokens), now, answered)
        accepted = sum(rank >= 0 for _, rank in world.walk(SHAPE, rng))
        tokens = [*tokens, *proposal.token_ids[:accepted], 0]
        waits = 4 * world.network + world.step_s(1 + SHAPE.depth) + world.other
        now = answered + waits * _noise(world, rng) * UNIT_S
        meter.asked("s", tokens, now)
    return meter.gained / (now / UNIT_S)


def _noise(world: World, rng: random.Random) -> float:
    return max(0.3, rng.gauss(1.0, world.noise))


def measure(seeds: int) -> dict[str, Any]:
    """Return truth and estimate of each world, and their differences."""
    worlds = []
    for alpha, draft, network, per_token in GRID:
        world = World(alpha=alpha, draft=draft, network=network, per_token=per_token)
        plain = world.speed(PLAIN)
        worlds.append(
            {
                "world": {"alpha": alpha, "draft": draft, "network": network, "per_token": per_token},
                "truth": world.speed(SHAPE) / plain - 1.0,
                "estimate": statistics.mean(estimate(world, seed) for seed in range(seeds)) / plain,
            }
        )
    return {"cycles": CYCLES, "seeds": seeds, "sets": _sets(worlds), "worlds": worlds}


def _sets(worlds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for per_token in sorted({world["world"]["per_token"] for world in worlds}):
        some = [world for world in worlds if world["world"]["per_token"] == per_token]
        errors = [world["estimate"] - world["truth"] for world in some]
        rows.append(
            {
                "per_token": per_token,
                "num_worlds": len(some),
                "mean_error": statistics.mean(errors),
                "largest_error": max(errors, key=abs),
                "num_gaining": sum(world["truth"] > 0 for world in some),
                "num_missed": sum(world["truth"] > 0 >= world["estimate"] for world in some),
                "num_false": sum(world["truth"] <= 0 < world["estimate"] for world in some),
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, print a table, write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2, help="runs per world")
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args(argv)
    result = measure(options.seeds)
    table = plain_table(
        "Estimated minus true gain, in units of plain decoding",
        (
            "cost of a row",
            "worlds",
            "mean",
            "largest",
            "gaining",
            "of them missed",
            "not gaining, taken for it",
        ),
    )
    for row in result["sets"]:
        table.add_row(
            f"{row['per_token']:g}",
            str(row["num_worlds"]),
            f"{row['mean_error']:+.2f}",
            f"{row['largest_error']:+.2f}",
            str(row["num_gaining"]),
            str(row["num_missed"]),
            str(row["num_false"]),
        )
    Console().print(table)
    print(f"written: {write_result('gain', result, options.out)}")


if __name__ == "__main__":
    main()
