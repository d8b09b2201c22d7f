"""`gammaray certs`: certificates for mutual TLS inside a cluster, for development."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

__all__ = ["certs"]


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--days", type=int, default=365, show_default=True, help="Validity of the certificates.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Additional name or address of `server`; repeatable.",
)
def certs(directory: Path, days: int, hosts: tuple[str, ...]) -> None:
    """Create a development CA in DIRECTORY, and certificates for orchestrators, workers and a server (Redis).

    Run it again to renew the certificates: the CA is kept, and processes reload the files automatically.
    """
    if find_spec("cryptography") is None:
        raise click.ClickException("certificates need a package: pip install 'gammaray[orchestrator]'")
    from gammaray.security.certs import make_certificates

    for role, files in make_certificates(directory, days, hosts).items():
        click.echo(f"# {role}")
        for name in ("ca", "cert", "key"):
            click.echo(f"GAMMARAY_TLS_{name.upper()}={getattr(files, name)}")
