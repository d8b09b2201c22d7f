"""Tables of `benchmarks.run` in addition to those of `gammaray bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from gammaray.bench.tables import SPEED, Columns, figure, plain_table

__all__ = ["COMPARISON", "cycle_cost_table"]

COMPARISON: Columns = {
    "system": SPEED["system"],
    "tok/s": SPEED["tok/s"],
    "x generate": figure("over_generate", "median"),
    "x assisted": figure("over_assisted", "median"),
    "x gamma 0": SPEED["x gamma 0"],
    "tok/ cycle": SPEED["tok/ cycle"],
    "alpha": SPEED["alpha"],
    "gamma": SPEED["gamma"],
}
"""What `run` shows of its rows."""


def cycle_cost_table(costs: Sequence[dict[str, Any]]) -> Table:
    """Return where the time of a cycle goes, one row per gamma."""
    columns = ("gamma", "cycle", "forwards", "workers", "gRPC", "orchestrator, Redis", "overhead", "%")
    table = plain_table("Overhead of a cycle over the model forwards (median ms)", columns)
    for cost in costs:
        parts = ("cycle_ms", "forward_ms", "worker_ms", "wire_ms", "orchestrator_ms", "overhead_ms")
        cells = [f"{cost[part]:.2f}" for part in parts]
        table.add_row(str(cost["gamma"]), *cells, f"{cost['overhead_percent']:.1f}")
    return table
