"""Result rows as tables: for the terminal, and as Markdown for the README."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

__all__ = ["cycle_cost_table", "markdown", "plain_table", "rich_table"]

_COLUMNS = ("system", "tokens/s", "x generate", "x gamma 0", "tok/cycle", "alpha", "gamma")
_TEXT = {"system", "comparison", "figure"}


def plain_table(title: str, columns: Sequence[str]) -> Table:
    """Return an empty table that fits eighty characters; columns of text stand left, of numbers right."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXT else "right", no_wrap=True)
    return table


def rich_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows of one temperature for the terminal."""
    table = plain_table(title, _COLUMNS)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of one temperature as a Markdown table."""
    lines = [_line(_COLUMNS), _line(["---"] + ["---:"] * (len(_COLUMNS) - 1))]
    return "\n".join([*lines, *(_line(_cells(row)) for row in rows)])


def cycle_cost_table(costs: Sequence[dict[str, Any]]) -> Table:
    """Return where the time of a cycle goes, one row per gamma."""
    columns = ("gamma", "cycle", "forwards", "workers", "gRPC", "orchestrator, Redis", "beside", "%")
    table = plain_table("Cost of a cycle beside the model forwards (median ms)", columns)
    for cost in costs:
        parts = ("cycle_ms", "forward_ms", "worker_ms", "wire_ms", "orchestrator_ms", "beside_ms")
        cells = [f"{cost[part]:.2f}" for part in parts]
        table.add_row(str(cost["gamma"]), *cells, f"{cost['beside_percent']:.1f}")
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["system"], f"{row['tokens_per_s']['median']:.1f}"]
    cells += [_ratio(row["over_generate"]), _ratio(row["over_plain"])]
    speculation = row["speculation"] or {}
    for name in ("tokens_per_cycle", "alpha", "gamma_mean"):
        value = speculation.get(name)
        cells.append("" if value is None else f"{value:.2f}")
    return cells


def _ratio(ratio: dict[str, Any] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.2f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
