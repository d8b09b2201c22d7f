"""Output of commands: tables of aligned columns, styled on a terminal and plain elsewhere."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from rich.console import Console
from rich.table import Table

_NO_WIDTH = 100_000
"""Width of output to a file or pipe: no cell is truncated or wrapped."""


def output_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_NO_WIDTH, emoji=False)


def columns(*names: str, right: Container[str] = (), **options: Any) -> Table:
    """Return a table without lines whose columns have these names; `options` are those of `add_column`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(
            name, justify="right" if name in right else "left", **(options or {"overflow": "fold"})
        )
    return table
