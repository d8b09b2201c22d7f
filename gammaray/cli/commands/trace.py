"""`gammaray trace`: the cycles of a session as a timeline, from its stored cycle records.

No tracing backend is needed. Each cycle is one line, with a bar divided by phase."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gammaray.cli.options import Connection, connection_options
from gammaray.program.output import output_console
from gammaray.program.values import IntRange
from gammaray.wire.cycles import CycleRecord, WorkerCall

_BUSY, _WAITING, _OTHER = "█", "░", "·"
_PROPOSE, _VERIFY = "cyan", "magenta"
_MAX_NODES_DRAWN = 12

_PIPE_WIDTH = 120


def timeline(cycles: Sequence[CycleRecord], bar_width: int = 40) -> RenderableType:
    """Return a session's timeline with a summary; bars share a scale, which cuts off the slowest tenth."""
    parts: list[RenderableType] = [_legend()]
    scale_s = sorted(cycle.total_s for cycle in cycles)[int(0.9 * (len(cycles) - 1))] * 1.1
    for (turn, epoch), records in groupby(cycles, key=lambda cycle: (cycle.turn, cycle.epoch)):
        group = list(records)
        if len(cycles) != len(group):
            parts.append(Text(f"turn {turn}, owner's epoch {epoch}", style="dim"))
        parts.append(_table(group, bar_width / scale_s, bar_width))
    parts.append(_summary(cycles))
    return Group(*parts)


def _table(cycles: Sequence[CycleRecord], columns_per_s: float, bar_width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("AT", "MS"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("TIME BY PHASE", no_wrap=True, width=bar_width)
    table.add_column("γ", justify="right", no_wrap=True)
    table.add_column("TOKENS", no_wrap=True)
    table.add_column("REASON, DRAFTER, NOTES", overflow="fold")
    start_s = cycles[0].start_s
    for cycle in cycles:
        table.add_row(
            f"{(cycle.start_s - start_s) * 1e3:.1f}",
            f"{cycle.total_s * 1e3:.2f}",
            _bar(cycle, columns_per_s, bar_width),
            str(cycle.gamma),
            _tokens(cycle),
            Text(", ".join(_notes(cycle)), style="dim"),
        )
    return table


def _bar(cycle: CycleRecord, columns_per_s: float, bar_width: int) -> Text:
    bar = Text()
    other_s = max(0.0, cycle.total_s - cycle.propose_s - cycle.verify_s)
    reached_s = 0.0
    for seconds, mark, style in (
        *_waited(cycle.propose_s, cycle.draft, _PROPOSE),
        *_waited(cycle.verify_s, cycle.target, _VERIFY),
        (other_s, _OTHER, "dim"),
    ):
        before, reached_s = round(reached_s * columns_per_s), reached_s + seconds
        bar.append(mark * (round(reached_s * columns_per_s) - before), style)
    if len(bar) > bar_width:
        bar.truncate(bar_width - 1)
        bar.append("»", "bold")
    return bar


def _waited(seconds: float, call: WorkerCall | None, style: str) -> Iterator[tuple[float, str, str]]:
    """Split a wait into the worker's compute time and the rest: its queue and the network."""
    busy_s = seconds if call is None else min(seconds, call.compute_s)
    yield busy_s, _BUSY, style
    yield seconds - busy_s, _WAITING, style


def _tokens(cycle: CycleRecord) -> Text:
    text = Text()
    if cycle.drafted > _MAX_NODES_DRAWN:
        text.append(f"{cycle.accepted} of {cycle.drafted}", "green")
    else:
        text.append("●" * cycle.accepted, "green")
        text.append("○" * (cycle.drafted - cycle.accepted), "red")
    if cycle.next_origin is not None:
        text.append(
            f"+{cycle.next_origin.value[0]}", "yellow" if cycle.next_origin.value[0] == "c" else "blue"
        )
    return text


def _notes(cycle: CycleRecord) -> Iterator[str]:
    if cycle.gamma_reason:
        yield cycle.gamma_reason
    if cycle.gamma:
        version = f" version {cycle.drafter_version}" if cycle.drafter_version else ""
        yield cycle.drafter.value + version if cycle.drafted else "no proposal"
    if cycle.draft_failed:
        yield "drafter failed"
    if cycle.draft_ahead_hit:
        yield "prepared ahead"
    for call in (cycle.draft, cycle.target):
        if call is None:
            continue
        role = "draft" if call is cycle.draft else "target"
        if call.error:
            yield f"{role} {call.address}: {call.error}"
        if call.blocks > 1:
            yield f"{role}: {call.blocks} blocks, {call.refed_tokens} tokens sent again"
        if call.batch_size > 1:
            yield f"{role} batch of {call.batch_size}"


def _legend() -> Text:
    return Text.assemble(
        ("█ propose ", _PROPOSE),
        ("█ verify ", _VERIFY),
        "(░ network and queue) · other   ",
        ("● accepted ", "green"),
        ("○ not accepted ", "red"),
        ("+c correction ", "yellow"),
        ("+b bonus (nothing rejected)", "blue"),
    )


def _summary(cycles: Sequence[CycleRecord]) -> Text:
    total_s = sum(cycle.total_s for cycle in cycles)
    emitted = sum(cycle.emitted for cycle in cycles)
    tested, accepted = sum(c.tested for c in cycles), sum(c.accepted for c in cycles)
    share = {
        "propose": sum(cycle.propose_s for cycle in cycles) / total_s,
        "verify": sum(cycle.verify_s for cycle in cycles) / total_s,
    }
    share["other"] = 1 - sum(share.values())
    hits = sum(cycle.draft_ahead_hit for cycle in cycles)
    words = [
        f"{len(cycles)} cycles, {emitted} tokens in {total_s * 1e3:.1f} ms",
        f"{emitted / len(cycles):.2f} tokens per cycle",
        *([f"alpha {accepted / tested:.3f}"] if tested else []),
        *([f"{hits} proposals prepared ahead"] if hits else []),
        ", ".join(f"{name} {part:.0%}" for name, part in share.items()),
    ]
    return Text("; ".join(words), style="bold")


@click.command()
@click.argument("session")
@connection_options(timeout_s=10.0)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.option("--last", type=IntRange(1), help="Show only the latest N cycles.")
def trace(session: str, connection: Connection, as_json: bool, last: int | None) -> None:
    """Show the tokens and times of each cycle of a SESSION."""
    cycles = connection.call(lambda client: client.session_trace(session, timeout_s=connection.timeout_s))
    cycles = cycles[-last:] if last is not None else cycles
    if as_json:
        click.echo(
            json.dumps({"session_id": session, "cycles": [asdict(cycle) for cycle in cycles]}, indent=2)
        )
        return
    if not cycles:
        click.echo("no cycles yet")
        return
    console = output_console()
    width = console.width if console.is_terminal else _PIPE_WIDTH
    console.print(timeline(cycles, bar_width=max(20, width // 3)))
