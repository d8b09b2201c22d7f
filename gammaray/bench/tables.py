"""Result rows as tables: for the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from gammaray.bench.rows import Row

__all__ = [
    "latency_table",
    "markdown",
    "plain_table",
    "speed_table",
    "split_table",
]

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


_SPEED: _Columns = {
    "system": _system,
    "tok/s": _figure("tokens_per_s", "median", digits=1),
    "x gamma 0": _figure("over_plain", "median"),
    "tok/ cycle": _figure("speculation", "tokens_per_cycle"),
    "alpha": _figure("speculation", "alpha"),
    "accepted": _figure("speculation", "acceptance_rate"),
    "gamma": _figure("speculation", "gamma_mean"),
}
_LATENCY: _Columns = {
    "system": _system,
    "first p50": _figure("first_token_ms", "p50", digits=1),
    "p99": _figure("first_token_ms", "p99", digits=1),
    "gap p50": _figure("between_tokens", "p50_ms", digits=1),
    "p95": _figure("between_tokens", "p95_ms", digits=1),
    "p99 ": _figure("between_tokens", "p99_ms", digits=1),
    "paced p99": _figure("between_tokens", "paced", "p99_ms", digits=1),
    "CV²": _figure("between_tokens", "cv2"),
    "k-1": _figure("between_tokens", "expected", "cv2"),
    "0 gaps": _figure("between_tokens", "zero_share"),
}
_SPLIT: _Columns = {
    "system": _system,
    **{part: _figure("speculation", "cycle_ms", part) for part in ("draft", "verify", "other", "total")},
}


def plain_table(title: str, columns: Sequence[str]) -> Table:
    """Return an empty table: text columns aligned left, numbers right; headings may take two lines."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        is_text = column in _TEXT
        table.add_column(column, justify="left" if is_text else "right", no_wrap=is_text, vertical="bottom")
    return table


def speed_table(title: str, rows: Sequence[Row]) -> Table:
    """Return a table of speed, speedups and speculation metrics."""
    return _table(title, rows, _SPEED)


def latency_table(rows: Sequence[Row]) -> Table:
    """Return a table of time to first token, gaps between tokens, and burstiness with its closed form."""
    streamed = [row for row in rows if row["between_tokens"] is not None]
    return _table("First token, gaps between tokens (ms), and how bursty they are", streamed, _LATENCY)


def split_table(rows: Sequence[Row]) -> Table:
    """Return a table of the time per phase of a cycle, as reported by the orchestrator."""
    speculative = [row for row in rows if row["speculation"] is not None]
    return _table("A cycle as the orchestrator sees it, prefill included (mean ms)", speculative, _SPLIT)


def markdown(rows: Sequence[Row]) -> str:
    """Return speed, speedups and speculation metrics as a Markdown table."""
    lines = [_line(_SPEED), _line(["---"] + ["---:"] * (len(_SPEED) - 1))]
    return "\n".join([*lines, *(_line([cell(row) for cell in _SPEED.values()]) for row in rows)])


def _table(title: str, rows: Sequence[Row], columns: _Columns) -> Table:
    table = plain_table(title, tuple(columns))
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def _line(cells: Sequence[str] | _Columns) -> str:
    return f"| {' | '.join(cells)} |"
