"""`gammaray train` and `gammaray drafters`: drafters that are trained beforehand, and while they serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gammaray.cli.program import WORKER_PACKAGES, Program, become, check_packages
from gammaray.errors import DeadlineExceededError, InvalidArgumentError
from gammaray.learning.folder import LearningFolder
from gammaray.program.output import columns, output_console
from gammaray.program.prompts import read_prompts
from gammaray.program.settings import checked_settings, settings_options
from gammaray.qualify.training import TrainTask

CONFIRM_WAIT_S = 10.0

_drafter = click.argument("drafter")
_tenant = click.argument("tenant")


@click.command(cls=Program, params=settings_options(TrainTask, has_types=True), help=TrainTask.__doc__)
def train(**options: Any) -> None:
    check_packages("training", WORKER_PACKAGES, "worker")
    task = checked_settings(TrainTask, options)
    if task.prompts:
        read_prompts(Path(task.prompts), "--prompts")
    become("services.train")


@click.group()
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="GAMMARAY_LEARN",
    required=True,
    show_envvar=True,
    help="Where the workers of this machine learn; they follow changes within a second.",
)
@click.pass_context
def drafters(context: click.Context, folder: Path) -> None:
    """List, pin and roll back the drafters that this machine has learnt; say whose streams it learns from.

    DRAFTER is `open` without API keys, else `shared` or `tenant-NAME`. Version 0 is the drafter of the start.
    """
    context.obj = LearningFolder(folder)
    if context.invoked_subcommand != "allow" and not context.obj.is_one():
        raise InvalidArgumentError("folder", str(folder), "one in which workers learn")


@drafters.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.pass_obj
def list_drafters(folder: LearningFolder, as_json: bool) -> None:
    """List the streams and versions of every drafter, what is trained or why nothing is, and who agreed."""
    progress, found = folder.progress(), {store.path.name: store.read() for store in folder.stores()}
    if as_json:
        drafters = {name: one.model_dump(mode="json") for name, one in found.items()}
        listed = {"tenants": folder.read().tenants, "drafters": drafters, "progress": progress}
        click.echo(json.dumps(listed, indent=2))
        return
    table = columns("DRAFTER", "STREAMS", "TOKENS", "TRAINING", right=("STREAMS", "TOKENS"), overflow="fold")
    for name, of in progress.items():
        table.add_row(name, str(of["streams"]), str(of["tokens"]), str(of["training"]))
    output_console().print(table)
    right = ("VERSION", "PARENT", "TOKENS", "EXPECTED", "BEFORE")
    table = columns("DRAFTER", *right, "STATUS", "CREATED", "REASON", right=right, overflow="fold")
    for name, one in found.items():
        table.add_row(name, "0", "", "", "", "", "stable" if not one.stable else "", "", "")
        for v in one.versions:
            pinned = " (pinned)" if one.is_pinned and v.number == one.stable else ""
            numbers = (
                str(v.number),
                str(v.parent),
                str(v.tokens),
                f"{v.expected:.3f}",
                f"{v.parent_expected:.3f}",
            )
            table.add_row(name, *numbers, v.status + pinned, f"{v.created_at:%Y-%m-%d %H:%M:%S}", v.reason)
    output_console().print(table)


@drafters.command()
@_drafter
@click.argument("version", type=int)
@click.pass_obj
def pin(folder: LearningFolder, drafter: str, version: int) -> None:
    """Serve a version to all sessions of DRAFTER, and train no other one."""
    folder.store(drafter).pin(version)


@drafters.command()
@_drafter
@click.pass_obj
def unpin(folder: LearningFolder, drafter: str) -> None:
    """Train further versions of DRAFTER."""
    folder.store(drafter).unpin()


@drafters.command()
@_drafter
@click.argument("version", type=int)
@click.pass_obj
def rollback(folder: LearningFolder, drafter: str, version: int) -> None:
    """Serve the version before this one again; a candidate ends."""
    stable = folder.store(drafter).roll_back(version, "by `gammaray drafters rollback`")
    click.echo(f"version {stable} of {drafter} serves", err=True)


@drafters.command()
@_tenant
@click.option(
    "--shared", is_flag=True, help="For a drafter that these tenants share; else for one of its own."
)
@click.pass_obj
def allow(folder: LearningFolder, tenant: str, shared: bool) -> None:
    """Keep the streams of TENANT on this machine, and train a drafter from them."""
    folder.secure()
    folder.consent(tenant, "shared" if shared else "own")


@drafters.command()
@_tenant
@click.pass_obj
def forget(folder: LearningFolder, tenant: str) -> None:
    """Withdraw `allow`: delete the streams of TENANT, and the versions that were trained on them.

    Says of each worker whether it has confirmed that it keeps nothing more; exits with 1 if one has not.
    """
    folder.secure()
    for name, numbers in folder.forget(tenant).items():
        click.echo(f"{name}: retired {', '.join(map(str, numbers))}", err=True)
    workers = folder.confirmations(CONFIRM_WAIT_S)
    for name, has_confirmed in workers.items():
        click.echo(f"worker {name}: {'confirmed' if has_confirmed else 'not confirmed'}", err=True)
    if not all(workers.values()):
        raise DeadlineExceededError(
            f"a worker has not confirmed within {CONFIRM_WAIT_S:g} s: see its log, and repeat this command"
        )
