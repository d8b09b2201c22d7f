"""`gammaray sessions`: list, resume, cancel and delete sessions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.table import Table

from gammaray.cli.options import Connection, connection_options
from gammaray.client.async_client import AsyncClient
from gammaray.program.output import columns, output_console
from gammaray.program.values import IntRange
from gammaray.wire.sessions import SessionInfo


@click.group()
def sessions() -> None:
    """List, resume, cancel and delete sessions."""


@sessions.command("list")
@connection_options(timeout_s=10.0)
@click.option("--limit", type=IntRange(1, 1000), default=100, help="Maximum number of sessions.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def list_(connection: Connection, limit: int, as_json: bool) -> None:
    """List your sessions, most recently active first."""
    found = connection.call(lambda client: client.list_sessions(limit, timeout_s=connection.timeout_s))
    if as_json:
        click.echo(json.dumps({"sessions": [asdict(info) for info in found]}, indent=2))
        return
    output_console().print(_table(found))


@sessions.command()
@click.argument("session")
@connection_options(timeout_s=600.0)
@click.option("--turn", type=IntRange(0), default=0, help="Turn of the session.")
@click.option("--offset", type=IntRange(0), default=0, help="Number of tokens already received.")
def resume(session: str, connection: Connection, turn: int, offset: int) -> None:
    """Stream the rest of a SESSION's turn after its first tokens."""

    async def stream(client: AsyncClient) -> None:
        async for chunk in client.resume(session, turn=turn, offset=offset, timeout_s=connection.timeout_s):
            click.echo(chunk.text, nl=chunk.finish_reason is not None)

    connection.call(stream)


@sessions.command()
@click.argument("session")
@connection_options(timeout_s=10.0)
def cancel(session: str, connection: Connection) -> None:
    """End the current turn of a SESSION permanently."""
    info = connection.call(lambda client: client.cancel(session, timeout_s=connection.timeout_s))
    click.echo(f"{info.session_id}: {_state(info)}, {info.emitted_tokens} tokens")


@sessions.command()
@click.argument("session")
@connection_options(timeout_s=10.0)
def delete(session: str, connection: Connection) -> None:
    """End and delete a SESSION."""
    existed = connection.call(lambda client: client.delete_session(session, timeout_s=connection.timeout_s))
    click.echo(f"{session}: deleted" if existed else f"{session}: not found")


def _state(info: SessionInfo) -> str:
    return info.state.value if info.finish_reason is None else f"finished ({info.finish_reason.value})"


def _table(found: Sequence[SessionInfo]) -> Table:
    numbers = ("TURN", "PROMPT", "EMITTED", "EPOCH", "EXPIRES IN")
    table = columns("SESSION", "TURN", "STATE", *numbers[1:], right=numbers)
    for info in found:
        table.add_row(
            info.session_id,
            str(info.turn),
            _state(info),
            *map(str, (info.prompt_tokens, info.emitted_tokens, info.epoch)),
            f"{info.expires_in_ms / 1000:.0f} s",
        )
    return table
