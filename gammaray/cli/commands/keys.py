"""`gammaray keys`: make, list and revoke the API keys of a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from gammaray.cli.output import output_console
from gammaray.security.keys import create_key, read_keys, revoke_key

__all__ = ["keys"]

_file = click.option(
    "--file",
    "-f",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="GAMMARAY_API_KEYS_FILE",
    default="gammaray-keys.json",
    show_default=True,
    show_envvar=True,
    help="The key file; orchestrators read it again within a second of a change.",
)


@click.group()
def keys() -> None:
    """API keys: who may use a cluster, and whose sessions are whose.

    The file holds hashes. `gammaray up --api-keys-file FILE` asks every caller for a key of it.
    """


@keys.command()
@_file
@click.option("--tenant", "-t", default="default", show_default=True, help="Whom the key belongs to.")
@click.option("--note", default="", help="What to remember of it.")
def create(path: Path, tenant: str, note: str) -> None:
    """Make a key and print it, this once, on standard output."""
    key, secret = create_key(path, tenant, note)
    click.echo(f"key {key.id} of tenant {key.tenant}, in {path}; it is not shown again:", err=True)
    click.echo(secret)


@keys.command("list")
@_file
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def list_keys(path: Path, as_json: bool) -> None:
    """List the keys, without what is secret of them."""
    entries = [key.model_dump(mode="json", exclude={"sha256"}) for key in read_keys(path)]
    if as_json:
        click.echo(json.dumps({"keys": entries}, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("ID", "TENANT", "CREATED", "NOTE"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        table.add_row(*(Text(entry[name]) for name in ("id", "tenant", "created_at", "note")))
    output_console().print(table)


@keys.command()
@_file
@click.argument("key_id")
def revoke(path: Path, key_id: str) -> None:
    """Take a key out of the file: calls with it are refused within a second."""
    key = revoke_key(path, key_id)
    click.echo(f"revoked key {key.id} of tenant {key.tenant}", err=True)
