"""How near a cycle comes to its model forwards, which nothing around them can undercut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from gammaray.bench.optimum import cycle_ms
from gammaray.bench.rows import Row
from gammaray.bench.systems import stack_name
from gammaray.bench.tables import plain_table

__all__ = ["bounds", "bounds_table"]

Bound = dict[str, Any]


def bounds(rows: Sequence[Row], costs: Sequence[dict[str, Any]]) -> list[Bound]:
    """Return for each gamma with probed forwards how its cycle compares with them.

    - `sequential_share`: (draft + verify) / cycle; 1 is a stack that costs nothing.
    - `overlapped_share`: max(draft, verify) / cycle; 1 is that, and a draft that always worked ahead.
    - `speedup_overlapped`: tokens per cycle x plain forward / max(draft, verify), the speedup at 1.
    - `rho`: a draft step over a plain forward; `verify_cost`: verify over a plain forward.

    Args:
        rows: Systems under one load.
        costs: Made by `probe.cycle_cost`.
    """
    by_name = {row["system"]: row for row in rows}
    plain = next((cost["verify_ms"] for cost in costs if cost["gamma"] == "0"), None)
    found = []
    for cost in costs:
        row = by_name.get(stack_name(cost["gamma"]))
        cycle = cycle_ms(row) if row else None
        if row is None or cycle is None or plain is None:
            continue
        draft, verify = cost["draft_ms"], cost["verify_ms"]
        depth = int(cost["gamma"].partition("x")[0])
        found.append(
            {
                "system": row["system"],
                "cycle_ms": cycle,
                "draft_ms": draft,
                "verify_ms": verify,
                "rho": draft / depth / plain if depth else None,
                "verify_cost": verify / plain,
                "sequential_share": (draft + verify) / cycle,
                "overlapped_share": max(draft, verify) / cycle,
                "speedup_overlapped": row["speculation"]["tokens_per_cycle"] * plain / max(draft, verify),
            }
        )
    return found


def bounds_table(found: Sequence[Bound]) -> Table:
    """Return the bounds as a table for the terminal."""
    columns = ("system", "cycle", "draft", "verify", "rho", "% of sum", "% of larger", "max speedup")
    table = plain_table("A cycle and its forwards (ms)", columns)
    for bound in found:
        times = (f"{bound[part]:.2f}" for part in ("cycle_ms", "draft_ms", "verify_ms"))
        shares = (f"{100 * bound[f'{kind}_share']:.0f}" for kind in ("sequential", "overlapped"))
        rho = "" if bound["rho"] is None else f"{bound['rho']:.3f}"
        table.add_row(bound["system"], *times, rho, *shares, f"{bound['speedup_overlapped']:.2f}")
    return table
