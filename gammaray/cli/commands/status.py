"""`gammaray status`: the processes of a cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.table import Table

from gammaray.cli.options import Connection, connection_options
from gammaray.cli.output import columns, output_console
from gammaray.types import ProcessStatus


@click.command()
@connection_options(timeout_s=10.0)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def status(connection: Connection, as_json: bool) -> None:
    """List the processes of a cluster."""
    processes = connection.call(lambda client: client.status(timeout_s=connection.timeout_s))
    if as_json:
        click.echo(json.dumps({"processes": [asdict(process) for process in processes]}, indent=2))
    else:
        output_console().print(_table(processes))


def _table(processes: Sequence[ProcessStatus]) -> Table:
    names = ("ROLE", "PID", "ADDRESS", "MODEL", "HEALTHY", "SESSIONS", "METRICS", "KERNEL")
    table = columns(*names, right=("PID", "SESSIONS"))
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
