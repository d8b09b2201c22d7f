"""`gammaray keys`: API keys of a cluster, and its keys for receipts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from gammaray.program.output import columns, output_console
from gammaray.program.values import NEW_FILE
from gammaray.receipts.keys import published, rotate
from gammaray.security.keys import create_key, read_keys, revoke_key


def _file_option(variable: str, default: str) -> Callable[[Any], Any]:
    return click.option(
        *("--file", "-f", "path"),
        type=NEW_FILE,
        envvar=variable,
        default=default,
        show_envvar=True,
        help="The key file; orchestrators reload it within a second of a change.",
    )


_file = _file_option("GAMMARAY_API_KEYS_FILE", "gammaray-keys.json")


@click.group()
def keys() -> None:
    """Create, list and revoke API keys; the sessions of a key belong to its tenant.

    The file contains hashes. `gammaray up --api-keys-file FILE` requires a key from every client.
    """


@keys.command()
@_file
@click.option("--tenant", "-t", default="default", help="Tenant that owns the key.")
@click.option("--note", help="Note stored with the key.")
def create(path: Path, tenant: str, note: str | None) -> None:
    """Create a key and print it on standard output; it cannot be shown again."""
    key, secret = create_key(path, tenant, note or "")
    click.echo(f"key {key.id} of tenant {key.tenant}, in {path}; it is not shown again:", err=True)
    click.echo(secret)


@keys.command("list")
@_file
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def list_keys(path: Path, as_json: bool) -> None:
    """List the keys without their secrets."""
    entries = [key.model_dump(mode="json", exclude={"sha256"}) for key in read_keys(path)]
    if as_json:
        click.echo(json.dumps({"keys": entries}, indent=2))
        return
    table = columns("ID", "TENANT", "CREATED", "NOTE")
    for entry in entries:
        table.add_row(*(Text(entry[name]) for name in ("id", "tenant", "created_at", "note")))
    output_console().print(table)


@keys.command()
@_file
@click.argument("key_id")
def revoke(path: Path, key_id: str) -> None:
    """Remove a key from the file: calls with it are rejected within a second."""
    key = revoke_key(path, key_id)
    click.echo(f"revoked key {key.id} of tenant {key.tenant}", err=True)


@keys.command()
@_file_option("GAMMARAY_RECEIPT_KEYS_FILE", "gammaray-receipt-keys.json")
def receipts(path: Path) -> None:
    """Add a key that signs receipts from now on, and print the public keys for `gammaray check --key`.

    A new file gets its first key. Former keys lose their private part, and stay listed for their receipts.
    """
    found = rotate(path)
    click.echo(f"key {found[-1].kid} signs receipts, in {path}; keep the file secret", err=True)
    click.echo(json.dumps(published(found), indent=2))
