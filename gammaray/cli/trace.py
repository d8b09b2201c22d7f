"""`gammaray trace`: the cycles of a session, from its own records; no tracing backend is needed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import click

from gammaray.cli.connection import Connection, connection_options
from gammaray.cli.output import output_console
from gammaray.cli.timeline import timeline
from gammaray.cli.values import IntRange
from gammaray.wire.cycles import CycleRecord

__all__ = ["trace"]

_PIPE_WIDTH = 120


@click.command()
@click.argument("session")
@connection_options(timeout_s=10.0)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.option("--last", type=IntRange(1), help="Only this many cycles, the latest.")
def trace(session: str, connection: Connection, as_json: bool, last: int | None) -> None:
    """Show what each cycle of a SESSION did and where its time went."""
    cycles = asyncio.run(_fetch(session, connection))
    cycles = cycles[-last:] if last is not None else cycles
    if as_json:
        click.echo(
            json.dumps({"session_id": session, "cycles": [asdict(cycle) for cycle in cycles]}, indent=2)
        )
        return
    if not cycles:
        click.echo("no cycles yet")
        return
    console = output_console()
    width = console.width if console.is_terminal else _PIPE_WIDTH
    console.print(timeline(cycles, bar_width=max(20, width // 3)))


async def _fetch(session: str, connection: Connection) -> list[CycleRecord]:
    async with connection.client() as client:
        return await client.session_trace(session, timeout_s=connection.timeout_s)
