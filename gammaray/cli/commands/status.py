"""`gammaray status`: the processes of a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.table import Table

from gammaray.cli.options import Connection, connection_options
from gammaray.cli.output import output_console
from gammaray.types import ProcessStatus

__all__ = ["status"]


@click.command()
@connection_options(timeout_s=10.0)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def status(connection: Connection, as_json: bool) -> None:
    """List the processes of a cluster."""
    processes = asyncio.run(_fetch(connection))
    if as_json:
        click.echo(json.dumps({"processes": [asdict(process) for process in processes]}, indent=2))
    else:
        output_console().print(_table(processes))


async def _fetch(connection: Connection) -> list[ProcessStatus]:
    async with connection.client() as client:
        return await client.status(timeout_s=connection.timeout_s)


def _table(processes: Sequence[ProcessStatus]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("ROLE", "PID", "ADDRESS", "MODEL", "HEALTHY", "SESSIONS", "METRICS", "KERNEL"):
        table.add_column(name, overflow="fold", justify="right" if name in ("PID", "SESSIONS") else "left")
    for process in processes:
        table.add_row(
            process.role,
            str(process.pid or "-"),
            process.address or "-",
            process.model or "-",
            "[green]yes[/]" if process.healthy else "[red]no[/]",
            str(process.sessions),
            process.metrics_address or "-",
            process.kernel or "-",
        )
    return table
