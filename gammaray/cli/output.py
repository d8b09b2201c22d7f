"""Output of commands: styled tables on a terminal, plain aligned columns elsewhere."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from rich.console import Console, ConsoleRenderable, Group, RenderHook
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

_NO_WIDTH = 100_000
"""Width of output to a pipe: no cell is truncated or wrapped."""


def output_console() -> Console:
    """Return a console for standard output.

    Tables written to a file or pipe are lines of aligned columns, with a heading, without box characters,
    colours or trailing spaces.
    """
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    console = Console(highlight=False, width=_NO_WIDTH, no_color=True, emoji=False)
    console.push_render_hook(_Plain(console))
    return console


def columns(*names: str, right: Container[str] = (), **options: Any) -> Table:
    """Return a table without lines whose columns have these names; `options` are those of `add_column`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(
            name, justify="right" if name in right else "left", **(options or {"overflow": "fold"})
        )
    return table


class _Plain(RenderHook):
    """Render hook that turns tables, and groups that may contain tables, into plain text."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [text for renderable in renderables for text in self._plain(renderable)]

    def _plain(self, renderable: object) -> list[ConsoleRenderable]:
        if isinstance(renderable, Group):
            return [text for part in renderable.renderables for text in self._plain(part)]
        if isinstance(renderable, Rule):
            title = renderable.title
            return [title if isinstance(title, Text) else Text(title)]
        if isinstance(renderable, Table):
            return self._table(renderable)
        if isinstance(renderable, str):
            return [self._console.render_str(renderable)]
        assert isinstance(renderable, ConsoleRenderable)
        return [renderable]

    def _table(self, table: Table) -> list[ConsoleRenderable]:
        title, table.title = table.title, None
        table.box, table.pad_edge, table.min_width = None, False, None
        # Columns are separated by two spaces, also where a table sets less.
        table.padding = (0, 2, 0, 0)
        for column in table.columns:
            column.overflow, column.no_wrap = "ignore", True
            if isinstance(column.header, str):
                column.header = " ".join(column.header.split())
        lines = self._console.render_lines(table, pad=False)
        texts = ["".join(segment.text for segment in line).rstrip() for line in lines]
        if title is not None:
            texts = [str(title), *texts, ""]
        return [Text(text, no_wrap=True, overflow="ignore") for text in texts]
