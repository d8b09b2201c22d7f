"""`gammaray top` and `gammaray status`: activity and processes of a cluster."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gammaray import __version__
from gammaray.cli.activity import Activity, Worker, measure
from gammaray.cli.options import Connection, connection_options
from gammaray.client.async_client import AsyncClient
from gammaray.program.output import columns, output_console
from gammaray.program.values import FloatRange
from gammaray.types import ProcessStatus

MAX_CLOCK_OFFSET_S = 2.0
"""Above what a busy machine and its network explain; times of traces and logs no longer fit together."""

_HISTORY = 60
_BARS = " ▁▂▃▄▅▆▇█"


@click.command()
@connection_options(timeout_s=10.0)
@click.option(
    *("--interval", "interval_s"),
    type=FloatRange(0.1, 3600),
    default=2.0,
    metavar="SECONDS",
    help="Time between updates.",
)
@click.option("--once", is_flag=True, help="Show one interval and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per interval, each on a line.")
def top(connection: Connection, interval_s: float, once: bool, as_json: bool) -> None:
    """Show live statistics of a cluster: speed, acceptance, gamma, queues and caches.

    Ratios cover the last interval, or the time since the start if nothing happened in it.
    """
    connection.call(lambda client: _top(client, connection.timeout_s, interval_s, once, as_json))


async def _top(client: AsyncClient, timeout_s: float, interval_s: float, once: bool, as_json: bool) -> None:
    console = output_console()
    history: deque[float] = deque(maxlen=_HISTORY)
    activities = _watch(client, timeout_s, interval_s)
    if as_json or once or not console.is_terminal:
        async for activity in activities:
            history.append(activity.total.tokens_per_s)
            if as_json:
                click.echo(json.dumps(asdict(activity)))
            else:
                console.print(view(activity, history))
            if once:
                return
    with Live(Text("connecting ..."), console=console, screen=True, auto_refresh=False) as live:
        async for activity in activities:
            history.append(activity.total.tokens_per_s)
            live.update(view(activity, history), refresh=True)


async def _watch(client: AsyncClient, timeout_s: float, interval_s: float) -> AsyncIterator[Activity]:
    before, began = await client.status(timeout_s=timeout_s), time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        after, now = await client.status(timeout_s=timeout_s), time.monotonic()
        yield measure(before, after, now - began)
        before, began = after, now


def view(activity: Activity, history: deque[float]) -> RenderableType:
    """Return the display of an interval; `history` are tokens per second up to it, oldest first."""
    total = activity.total
    head = Text.assemble(
        ("gammaray", "bold"),
        f"  {total.tokens_per_s:,.1f} tokens/s  ",
        (_sparkline(history), "green"),
        f"  speedup {_number(total.speedup, 'x')}  {total.running} running, {total.waiting} waiting",
    )
    return Group(head, "", _speculation(activity), "", _workers(activity.workers))


def _speculation(activity: Activity) -> Table:
    speeds = ("TOKENS/S", "CYCLES/S", "TOKENS/CYCLE", "ALPHA", "GAMMA", "SPEEDUP", "ERRORS/S")
    numbers = ("RUNNING", "WAITING", *speeds)
    table = columns("ORCHESTRATOR", *numbers, right=numbers, no_wrap=True)
    rows = [(str(own.pid), own) for own in activity.orchestrators]
    if len(rows) > 1:
        rows.append(("all", activity.total))
    for name, own in rows:
        table.add_row(
            name,
            str(own.running),
            str(own.waiting),
            f"{own.tokens_per_s:,.1f}",
            f"{own.cycles_per_s:,.1f}",
            _number(own.tokens_per_cycle),
            _number(own.alpha),
            _number(own.gamma),
            _number(own.speedup, "x"),
            f"[red]{own.failures_per_s:.2f}[/]" if own.failures_per_s else "0",
        )
    return table


def _workers(workers: tuple[Worker, ...]) -> Table:
    numbers = ("SESSIONS", "QUEUE", "BUSY", "STEPS/S", "BATCH", "KV CACHE", "AHEAD HITS")
    table = columns("WORKER", "ADDRESS", "HEALTHY", *numbers, right=numbers, no_wrap=True)
    for worker in workers:
        table.add_row(
            worker.role,
            worker.address,
            "[green]yes[/]" if worker.healthy else "[red]no[/]",
            str(worker.sessions),
            str(worker.queue),
            f"{worker.busy:.0%}",
            f"{worker.steps_per_s:,.1f}",
            _number(worker.batch),
            f"{worker.cache_use:.1%}",
            "-" if worker.ahead_hit_rate is None else f"{worker.ahead_hit_rate:.0%}",
        )
    return table


def _sparkline(values: deque[float]) -> str:
    most = max(values, default=0.0) or 1.0
    return "".join(_BARS[round((len(_BARS) - 1) * value / most)] for value in values)


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


@click.command()
@connection_options(timeout_s=10.0)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def status(connection: Connection, as_json: bool) -> None:
    """List the processes of a cluster."""
    processes = connection.call(lambda client: client.status(timeout_s=connection.timeout_s))
    if as_json:
        click.echo(json.dumps({"processes": [asdict(process) for process in processes]}, indent=2))
    else:
        console = output_console()
        console.print(_processes(processes))
        for trouble in troubles(processes):
            console.print(f"[red]{escape(trouble)}[/]", soft_wrap=True)


def _processes(processes: Sequence[ProcessStatus]) -> Table:
    names = "ROLE PID ADDRESS MODEL HEALTHY SESSIONS METRICS KERNEL VERSION CLOCK"
    table = columns(*names.split(), right=("PID", "SESSIONS", "CLOCK"))
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
            process.version or "-",
            "-" if process.clock_offset_s is None else f"{process.clock_offset_s:+.2f} s",
        )
    return table


def troubles(processes: Sequence[ProcessStatus]) -> list[str]:
    """Return what is wrong between processes: workers that cannot be used, versions, clocks."""
    found = []
    for process in processes:
        name = f"{process.role} {process.address or process.pid}"
        if process.role == "orchestrator":
            found += [f"orchestrator {process.pid} cannot use {worker}" for worker in process.unusable]
        if process.role != "redis" and process.version not in ("", __version__):
            found.append(f"{name} has gammaray {process.version}, this command {__version__}")
        if abs(process.clock_offset_s or 0.0) > MAX_CLOCK_OFFSET_S:
            found.append(f"the clock of {name} differs by {process.clock_offset_s:+.1f} s")
    return found
