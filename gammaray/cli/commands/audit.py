"""`gammaray audit`: check from outside whether a server's text follows what it says of itself.

Exit codes: 0 all checks that are possible passed, 1 one failed, 3 one is inconclusive or none was possible.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timezone
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gammaray.audit.endpoint import Endpoint, Spent
from gammaray.audit.findings import Status
from gammaray.audit.report import audit_page, audit_result, show
from gammaray.audit.run import CHECKS, overall, run_audit
from gammaray.audit.subject import Subject, default_prompts, read_prompts
from gammaray.cli.local_cluster import local_cluster
from gammaray.cli.program import CLUSTER_PACKAGES, check_packages
from gammaray.errors import GammarayError, escaped
from gammaray.program.output import output_console
from gammaray.program.values import GIVEN_FILE, NEW_FILE, FloatRange, IntRange, list_of

EXIT_CODES = {Status.PASSED: 0, Status.FAILED: 1, Status.INCONCLUSIVE: 3}
_PERIOD_S = 10.0


def _check_name(text: str) -> str:
    if text not in CHECKS:
        raise ValueError(text)
    return text


def _fields(context: click.Context, parameter: click.Parameter, value: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise click.BadParameter(f"got {value[:60]!r}, allowed: a JSON object", context, parameter)
    return found


@click.command()
@click.argument("url")
@click.option("--model", metavar="NAME", help="Model of the requests; by default the server's first.")
@click.option(
    *("--api-key-env", "variable"),
    default="OPENAI_API_KEY",
    metavar="NAME",
    help="Environment variable that holds the API key, if the server requires one.",
)
@click.option(
    "--reference",
    metavar="URL|DIR",
    help="What is right: a second server, or a model directory, which `gammaray up` serves without drafts.",
)
@click.option(
    "--reference-draft",
    metavar="URL|DIR",
    help="The server's draft model: `law` bets on its choices. The server must report token ids (vLLM does).",
)
@click.option("--prompts", type=GIVEN_FILE, help="One per line, or JSON lines.")
@click.option(
    "--checks",
    default=",".join(CHECKS),
    callback=list_of(_check_name, ", ".join(CHECKS)),
    metavar="NAME,...",
    help="Checks to run.",
)
@click.option("--concurrency", type=IntRange(1, 256), default=9, help="Requests in flight.")
@click.option(
    "--max-tokens-total",
    type=IntRange(1),
    default=200_000,
    help="Bound of the tokens that are asked for, over all checks.",
)
@click.option(
    "--alpha",
    type=FloatRange(0, 0.1, min_open=True),
    default=0.005,
    help="Probability of a false alarm of the whole audit.",
)
@click.option(
    *("--timeout", "timeout_s"),
    type=FloatRange(0, 3600, min_open=True),
    default=120.0,
    help="Of a request, in seconds.",
)
@click.option(
    "--fields",
    default="{}",
    callback=_fields,
    metavar="JSON",
    help='Further fields of every request, such as {"gammaray": {"verification": "block"}}.',
)
@click.option("--seed", type=IntRange(0, 2**31), default=1, help="First seed of the requests.")
@click.option("--json", "json_file", type=NEW_FILE, help="File for the result.")
@click.option("--html", "html_file", type=NEW_FILE, help="File for a page with charts.")
def audit(url: str, **options: Any) -> None:
    """Check from outside whether a server's text follows its model.

    URL is its base URL, with or without /v1.
    """
    prompts = default_prompts() if options["prompts"] is None else read_prompts(options["prompts"])
    variable = options["variable"]
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        raise click.BadParameter(f"got {variable!r}, allowed: a variable's name", param_hint="--api-key-env")
    server = Endpoint(
        *(url, options["model"] or "", os.environ.get(variable, ""), variable, options["concurrency"]),
        *(Spent(options["max_tokens_total"]), options["timeout_s"], options["fields"]),
    )
    subject = Subject(server, None, prompts, options["alpha"], options["seed"])
    places = [options[name] or "" for name in ("reference", "reference_draft")]
    others = [(place, os.path.isdir(place)) for place in places]
    interrupted: BaseException | None = None
    try:
        asyncio.run(_run(subject, options["checks"], others))
    except (KeyboardInterrupt, GammarayError) as error:
        interrupted = error
    if interrupted is not None and not subject.findings:
        raise interrupted
    findings = list(subject.findings.values())
    show(output_console(), findings)
    about = {"url": server.url, "model": escaped(server.model), "alpha": options["alpha"]}
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    found = audit_result(findings, **about, date_utc=date, is_complete=interrupted is None)
    if options["json_file"] is not None:
        options["json_file"].write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options["html_file"] is not None:
        options["html_file"].write_text(audit_page(found), encoding="utf-8")
    if interrupted is not None:
        raise interrupted
    click.get_current_context().exit(EXIT_CODES[overall(findings)])


class _Teller:
    """Shows what is being done: at once on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, show: Callable[[str], None], is_terminal: bool) -> None:
        self._show, self._is_terminal, self._told = show, is_terminal, time.monotonic()

    def __call__(self, text: str) -> None:
        self._show(text)
        if not self._is_terminal and time.monotonic() - self._told >= _PERIOD_S:
            self._told = time.monotonic()
            click.echo(text, err=True)


async def _run(subject: Subject, checks: Sequence[str], others: Sequence[tuple[str, bool]]) -> None:
    """Run an audit; `others` are reference and drafter: each its place, and whether it is a directory."""
    errors = Console(stderr=True)
    bar = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=errors)
    bar.live.transient = True
    async with AsyncExitStack() as stack:
        stack.enter_context(bar)
        stack.push_async_callback(subject.close)
        task = bar.add_task("probing the server")
        subject.tell = _Teller(lambda text: bar.update(task, description=text), errors.is_terminal)
        subject.server.model = subject.server.model or await subject.server.first_model()
        found: list[Endpoint | None] = []
        for place, is_directory in others:
            if is_directory:
                check_packages("a reference that is a directory", CLUSTER_PACKAGES, "all")
                subject.tell(f"starting {place}")
                place = (await stack.enter_async_context(local_cluster("--target", place))).http
            found.append(subject.server.beside(place) if place else None)
            if (other := found[-1]) is not None:
                other.model = await other.first_model()
        subject.reference, subject.drafter = found
        async for finding in run_audit(subject, checks):
            if not errors.is_terminal:
                click.echo(f"{finding.check}: {finding.result.status.value}", err=True)
