"""Adaptive gamma, its parts, a bandit and every fixed gamma compared in simulation.

    python -m benchmarks.ablation                       # all sets and all controllers
    python -m benchmarks.ablation --sets useless --controllers 'adaptive;bandit' --seeds 1

A share is expected tokens per second over the oracle's, which knows acceptance and costs and always plays
the best shape. Sets of worlds:

- `chains`, `trees`: the 108 of `worlds.GRID`, with chains only and with trees of up to 32 nodes.
- `useless`: 48 with drafts that agree rarely (alpha 0.2 to 0.5) and whose forwards take 0.3 to 0.6 of one of
  the target.
- `turn`: a useless draft becomes good. After 200 cycles of a fresh replica, the first figures are of 700
  cycles while the draft is useless, the others of the 300 after the change; ten replicas for each seed.
- `load`: 1, 8, 64, 8 and 1 sessions in turn on one fleet, against the best common gamma of each load.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.bandit import Arms, BanditGamma
from benchmarks.provenance import write_result
from benchmarks.simulation import Controller as GammaController
from benchmarks.simulation import Lone, crowd, drive
from benchmarks.worlds import GRID, MAX_GAMMA, World, candidates
from gammaray.bench.tables import plain_table
from orchestrator.control import costs as cost_model
from orchestrator.control.adaptive import AdaptiveGamma
from orchestrator.control.costs import CostModel
from orchestrator.control.fixed import FixedGamma

FIRST, THEN = 200, 400
"""Cycles of a fresh replica, and those after them; their shares are reported separately."""

MAX_NODES = 32
LOADS = (1, 8, 64, 8, 1)
ROUNDS = {1: 400, 8: 150, 64: 60}
"""Cycles of each session at a load."""

USELESS = list(itertools.product((0.2, 0.3, 0.4, 0.5), (0.3, 0.45, 0.6), (0.0, 0.1), (0.02, 0.1)))
USELESS_AT_FIRST = (World(alpha=0.05, draft=0.5), World(alpha=0.3, draft=0.6))
GOOD = World(alpha=0.9)
LOADED = {
    "cheap rows": World(alpha=0.75, per_token=0.005, draft=0.05),
    "dear rows": World(alpha=0.75, per_token=0.04, draft=0.03, spikes=0.0),
    "shared cores": World(alpha=0.75, per_token=0.03, draft=0.03, spikes=0.0, strain=0.3),
    "useless draft": World(alpha=0.4, per_token=0.02, draft=0.3),
    "compute bound": World(alpha=0.75, per_token=0.6, draft=0.03, spikes=0.0),
}

Make = Callable[[int, int, int], list[GammaController]]
"""Sessions, seed, upper bound of nodes -> controllers of one replica."""


@dataclass(frozen=True)
class Controller:
    """What is compared.

    Args:
        make: Makes the controllers of one replica's sessions.
        patches: (module, name, value) that take a part out of the controller.
        max_nodes: Lower bound of nodes than the set's, to take out trees.
    """

    make: Make
    patches: tuple[tuple[Any, str, Any], ...] = ()
    max_nodes: int = MAX_NODES

    def replica(self, num_sessions: int, seed: int, max_nodes: int) -> list[GammaController]:
        """Return fresh controllers that share what they learn."""
        return self.make(num_sessions, seed, min(max_nodes, self.max_nodes))

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Take the parts out for the length of a block."""
        before = [(module, name, getattr(module, name)) for module, name, _ in self.patches]
        for module, name, value in self.patches:
            setattr(module, name, value)
        try:
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)


def _adaptive(number: int, seed: int, max_nodes: int) -> list[GammaController]:
    costs = CostModel(random.Random(1000 + seed))
    return [AdaptiveGamma(MAX_GAMMA, costs, max_nodes) for _ in range(number)]


def _bandit(number: int, seed: int, max_nodes: int) -> list[GammaController]:
    arms = Arms(random.Random(1000 + seed))
    return [BanditGamma(MAX_GAMMA, arms) for _ in range(number)]


def _fixed(gamma: int) -> Make:
    return lambda number, seed, max_nodes: [FixedGamma(gamma, CostModel()) for _ in range(number)]


CONTROLLERS = {
    "adaptive": Controller(_adaptive),
    "adaptive, no trees": Controller(_adaptive, max_nodes=0),
    "adaptive, no sampling": Controller(_adaptive, ((cost_model, "SCALE", 0.0),)),
    "adaptive, no forgetting": Controller(
        _adaptive, ((cost_model, "FORGETTING", 0.0), (cost_model, "FIRST_FORGETTING", 0.0))
    ),
    "bandit": Controller(_bandit),
    **{f"gamma {gamma}": Controller(_fixed(gamma)) for gamma in range(MAX_GAMMA + 1)},
}
"""What can be compared, by name."""


@dataclass
class Shares:
    """Shares of the oracle's speed by world, means over seeds.

    Args:
        first: In the first cycles.
        then: In those after them.
    """

    first: list[float] = field(default_factory=list)
    then: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Return mean, tenth percentile and worst world of both."""
        found: dict[str, float] = {}
        for name, shares in (("first", self.first), ("then", self.then)):
            ordered = sorted(shares)
            tenth = ordered[len(ordered) // 10]
            found |= {f"{name}_mean": statistics.mean(shares), f"{name}_tenth": tenth}
            found[f"{name}_worst"] = ordered[0]
        return found


def _lone(worlds: Sequence[World], max_nodes: int) -> Callable[[Controller, int], Shares]:
    def play(controller: Controller, seeds: int) -> Shares:
        shares = Shares()
        for world in worlds:
            best = world.speed(world.best(candidates(MAX_GAMMA, max_nodes)))
            first, then = [], []
            for seed in range(seeds):
                (session,) = controller.replica(1, seed, max_nodes)
                lone = Lone(random.Random(seed), cold_drafts=5)
                first.append(drive(session, world, FIRST, lone).speed / best)
                then.append(drive(session, world, THEN, lone, is_new=False).speed / best)
            shares.first.append(statistics.mean(first))
            shares.then.append(statistics.mean(then))
        return shares

    return play


def _turned(controller: Controller, seeds: int) -> Shares:
    shares = Shares()
    for world in USELESS_AT_FIRST:
        for seed in range(10 * seeds):
            (session,) = controller.replica(1, seed, 0)
            lone = Lone(random.Random(seed))
            drive(session, world, FIRST, lone)
            for now, number, found in ((world, 700, shares.first), (GOOD, 300, shares.then)):
                best = now.speed(now.best(candidates(MAX_GAMMA, 0)))
                found.append(drive(session, now, number, lone, is_new=False).speed / best)
    return shares


def _loaded(controller: Controller, seeds: int) -> Shares:
    """The first time of each load counts as first, later ones as then."""
    shares = Shares()
    for world in LOADED.values():
        best = {n: _common(world, n) for n in set(LOADS)}
        by_load: dict[tuple[int, bool], list[float]] = {}
        for seed in range(seeds):
            rng, now = random.Random(seed), 0.0
            everybody = controller.replica(max(LOADS), seed, 0)
            for index, number in enumerate(LOADS):
                runs = crowd(everybody[:number], [world] * number, ROUNDS[number], rng, begins_at=now)
                now += runs[0].units
                share = sum(run.tokens for run in runs) / runs[0].units / best[number]
                by_load.setdefault((number, number in LOADS[:index]), []).append(share)
        for (_, is_again), found in by_load.items():
            (shares.then if is_again else shares.first).append(statistics.mean(found))
    return shares


def _common(world: World, number: int) -> float:
    """Return the speed of all sessions together at the best common gamma."""
    speeds = []
    for gamma in range(MAX_GAMMA + 1):
        fixed = [FixedGamma(gamma, CostModel()) for _ in range(number)]
        runs = crowd(fixed, [world] * number, 1, random.Random(0))
        speeds.append(sum(run.tokens for run in runs) / runs[0].units)
    return max(speeds)


def _worlds(grid: Sequence[tuple[float, float, float, float]]) -> list[World]:
    return [
        World(alpha=alpha, draft=draft, network=network, per_token=per_token)
        for alpha, draft, network, per_token in grid
    ]


SETS: dict[str, Callable[[Controller, int], Shares]] = {
    "chains": _lone(_worlds(GRID), 0),
    "trees": _lone([replace(world, rescue=(0.5, 0.4, 0.3)) for world in _worlds(GRID)], MAX_NODES),
    "useless": _lone(_worlds(USELESS), 0),
    "turn": _turned,
    "load": _loaded,
}
"""Sets of worlds by name."""


def ablation(
    sets: Sequence[str], controllers: Sequence[str], seeds: int, advance: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return the figures of all controllers on all sets; `advance` is called after each."""
    rows = []
    for name in sets:
        for system in controllers:
            controller = CONTROLLERS[system]
            with controller.patched():
                shares = SETS[name](controller, seeds)
            rows.append({"set": name, "controller": system, **shares.figures()})
            advance()
    return rows


def _table(rows: Sequence[dict[str, Any]], name: str) -> Table:
    parts = [f"{when}_{what}" for when in ("first", "then") for what in ("mean", "tenth", "worst")]
    table = plain_table(
        f"{name}: share of the oracle's speed", ("controller", *(p.replace("_", " ") for p in parts))
    )
    for row in rows:
        if row["set"] == name:
            table.add_row(row["controller"], *(f"{row[part]:.3f}" for part in parts))
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", default=",".join(SETS), help="comma-separated")
    parser.add_argument("--controllers", default=";".join(CONTROLLERS), help="separated by semicolons")
    parser.add_argument("--seeds", type=int, default=2, help="runs per world")
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args(argv)
    sets, names = options.sets.split(","), options.controllers.split(";")
    console = Console(width=120)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=len(sets) * len(names))
        rows = ablation(sets, names, options.seeds, lambda: progress.advance(task))
    for name in sets:
        console.print(_table(rows, name))
    settings = {"sets": sets, "controllers": names, "seeds": options.seeds}
    path = write_result("ablation", {"settings": settings, "rows": rows}, options.out)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
