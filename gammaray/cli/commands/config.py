"""`gammaray config`: print the settings that a cluster runs with, secrets left out."""

from __future__ import annotations

import json
from typing import Any, TextIO

import click
import yaml
from pydantic import ValidationError

from gammaray.config import ClusterSettings, settings_error
from gammaray.deploy.effective import effective_of_serve, effective_settings
from gammaray.deploy.serve_config import serve_document
from gammaray.errors import InvalidArgumentError


@click.command()
@click.argument("file", type=click.File(), required=False)
@click.option(
    "--serve", is_flag=True, help="Print the Ray Serve configuration of a cluster of several machines."
)
@click.option("--format", "form", type=click.Choice(["yaml", "json"]), default="yaml", show_default=True)
def config(file: TextIO | None, serve: bool, form: str) -> None:
    """Print the effective settings of every process, and name invalid ones.

    Without FILE, print those of `gammaray up` in this environment (GAMMARAY_*). FILE is a Ray Serve
    configuration, as in the chart's ConfigMap; - reads standard input.
    """
    if file is not None and serve:
        raise click.UsageError("FILE and --serve cannot be combined")
    document = effective_of_serve(_parsed(file)) if file is not None else _own(serve)
    if form == "json":
        click.echo(json.dumps(document, indent=2))
    else:
        click.echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), nl=False)


def _own(serve: bool) -> dict[str, Any]:
    given: dict[str, Any] = {}  # empty: every setting comes from the environment or its default
    try:
        cluster = ClusterSettings(**given)
    except ValidationError as error:
        raise settings_error(error) from None
    return serve_document(cluster) if serve else effective_settings(cluster)


def _parsed(file: TextIO) -> Any:
    try:
        return yaml.safe_load(file)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise InvalidArgumentError("FILE", file.name, f"YAML or JSON ({reason})") from None
