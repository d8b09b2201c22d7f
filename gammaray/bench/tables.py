"""Result rows as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from gammaray.bench.loops import loops_line
from gammaray.bench.rows import Row

_TEXT = {"system", "comparison", "figure", "workload", "role"}

_Cell = Callable[[Row], str]
_Columns = Mapping[str, _Cell]
"""Heading -> function that formats the cell of a row."""


def _figure(*path: str, digits: int = 2) -> _Cell:
    """Return a function that formats the number at `path` in a row; a missing number gives an empty cell."""

    def cell(row: Row) -> str:
        value: Any = row
        for key in path:
            value = value.get(key) if value is not None else None
        return "" if value is None else f"{value:.{digits}f}"

    return cell


def _system(row: Row) -> str:
    return str(row["system"])


SPEED: _Columns = {
    "system": _system,
    "tok/s": _figure("tokens_per_s", "median", digits=1),
    "x gamma 0": _figure("over_plain", "median"),
    "tok/ cycle": _figure("speculation", "tokens_per_cycle"),
    "alpha": _figure("speculation", "alpha"),
    "accepted": _figure("speculation", "acceptance_rate"),
    "gamma": _figure("speculation", "gamma_mean"),
}
"""Speed and acceptance."""

_LATENCY: _Columns = {
    "system": _system,
    "first p50": _figure("first_token_ms", "p50", digits=1),
    "p99": _figure("first_token_ms", "p99", digits=1),
    "gap p50": _figure("between_tokens", "p50_ms", digits=1),
    "p95": _figure("between_tokens", "p95_ms", digits=1),
    "p99 ": _figure("between_tokens", "p99_ms", digits=1),
}
_SPLIT: _Columns = {
    "system": _system,
    **{part: _figure("speculation", "cycle_ms", part) for part in ("draft", "verify", "other", "total")},
}


def plain_table(title: str, columns: Sequence[str]) -> Table:
    """Return an empty table: text columns aligned left, numbers right; headings may take two lines."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        is_text = column in _TEXT
        table.add_column(column, justify="left" if is_text else "right", no_wrap=is_text, vertical="bottom")
    return table


def show_point(console: Console, point: dict[str, Any]) -> None:
    """Print the tables of one temperature: speed, latency, and the time of each phase of a cycle."""
    rows: Sequence[Row] = point["rows"]
    console.print(_table(f"temperature {point['temperature']:g}", rows, SPEED))
    streamed = [row for row in rows if row["between_tokens"] is not None]
    console.print(_table("First token, gaps between tokens (ms)", streamed, _LATENCY))
    speculative = [row for row in rows if row["speculation"] is not None]
    title = "A cycle as the orchestrator sees it, prefill included (mean ms)"
    console.print(_table(title, speculative, _SPLIT))
    equality = point["equality"]
    console.print(f"same tokens as gamma 0: {equality['equal']} of {equality['compared']}")
    if line := loops_line(point["loops"]):
        console.print(line, soft_wrap=True)
    console.print()


def _table(title: str, rows: Sequence[Row], columns: _Columns) -> Table:
    table = plain_table(title, tuple(columns))
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table
