"""Result rows as tables: for the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from gammaray.bench.rows import Row

__all__ = [
    "SPEED",
    "Columns",
    "figure",
    "latency_table",
    "markdown",
    "plain_table",
    "speed_table",
    "split_table",
]

_TEXT = {"system", "comparison", "figure", "workload", "role"}

Cell = Callable[[Row], str]
Columns = Mapping[str, Cell]
"""Heading -> function that formats the cell of a row."""


def figure(*path: str, digits: int = 2) -> Cell:
    """Return a function that formats the number at `path` in a row; a missing number gives an empty cell."""

    def cell(row: Row) -> str:
        value: Any = row
        for key in path:
            value = value.get(key) if value is not None else None
        return "" if value is None else f"{value:.{digits}f}"

    return cell


def _system(row: Row) -> str:
    return str(row["system"])


SPEED: Columns = {
    "system": _system,
    "tok/s": figure("tokens_per_s", "median", digits=1),
    "x gamma 0": figure("over_plain", "median"),
    "tok/ cycle": figure("speculation", "tokens_per_cycle"),
    "alpha": figure("speculation", "alpha"),
    "accepted": figure("speculation", "acceptance_rate"),
    "gamma": figure("speculation", "gamma_mean"),
}
_LATENCY: Columns = {
    "system": _system,
    "first p50": figure("first_token_ms", "p50", digits=1),
    "p99": figure("first_token_ms", "p99", digits=1),
    "gap p50": figure("between_tokens", "p50_ms", digits=1),
    "p95": figure("between_tokens", "p95_ms", digits=1),
    "p99 ": figure("between_tokens", "p99_ms", digits=1),
    "paced p99": figure("between_tokens", "paced", "p99_ms", digits=1),
    "CV²": figure("between_tokens", "cv2"),
    "k-1": figure("between_tokens", "expected", "cv2"),
    "0 gaps": figure("between_tokens", "zero_share"),
}
_SPLIT: Columns = {
    "system": _system,
    **{part: figure("speculation", "cycle_ms", part) for part in ("draft", "verify", "other", "total")},
}


def plain_table(title: str, columns: Sequence[str]) -> Table:
    """Return an empty table: text columns aligned left, numbers right; headings may take two lines."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        is_text = column in _TEXT
        table.add_column(column, justify="left" if is_text else "right", no_wrap=is_text, vertical="bottom")
    return table


def speed_table(title: str, rows: Sequence[Row], columns: Columns = SPEED) -> Table:
    """Return a table of speed, speedups and speculation metrics."""
    return _table(title, rows, columns)


def latency_table(rows: Sequence[Row]) -> Table:
    """Return a table of time to first token, gaps between tokens, and burstiness with its closed form."""
    streamed = [row for row in rows if row["between_tokens"] is not None]
    return _table("First token, gaps between tokens (ms), and how bursty they are", streamed, _LATENCY)


def split_table(rows: Sequence[Row]) -> Table:
    """Return a table of the time per phase of a cycle, as reported by the orchestrator."""
    speculative = [row for row in rows if row["speculation"] is not None]
    return _table("A cycle as the orchestrator sees it, prefill included (mean ms)", speculative, _SPLIT)


def markdown(rows: Sequence[Row], columns: Columns = SPEED) -> str:
    """Return speed, speedups and speculation metrics as a Markdown table."""
    lines = [_line(columns), _line(["---"] + ["---:"] * (len(columns) - 1))]
    return "\n".join([*lines, *(_line([cell(row) for cell in columns.values()]) for row in rows)])


def _table(title: str, rows: Sequence[Row], columns: Columns) -> Table:
    table = plain_table(title, tuple(columns))
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def _line(cells: Sequence[str] | Columns) -> str:
    return f"| {' | '.join(cells)} |"
