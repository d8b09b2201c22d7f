"""`gammaray size`: choose draft, number of drafters per target, and network."""

from __future__ import annotations

from dataclasses import replace

import click
from rich.table import Table

from gammaray.cli.output import output_console
from gammaray.cli.values import IntRange
from gammaray.maths.sizing import Sizing

__all__ = ["size"]

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
DRAFT_COSTS = (0.02, 0.05, 0.1, 0.2, 0.4)
WIDTH = 100
RTTS_MS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)


@click.command()
@click.option(
    "--alpha", type=float, required=True, help="Accepted per tested token, as reported by `gammaray bench`."
)
@click.option("--target-ms", type=float, required=True, help="One target pass, in milliseconds.")
@click.option("--draft-ms", type=float, required=True, help="One draft step, in milliseconds.")
@click.option("--rtt-ms", type=float, default=0.5, show_default=True, help="Network time of a cycle.")
@click.option("--sessions", type=int, default=32, show_default=True, help="Concurrent sessions per target.")
@click.option(
    "--target-tokens",
    type=int,
    default=256,
    show_default=True,
    help="Tokens that a target pass verifies at no extra cost.",
)
@click.option("--draft-tokens", type=int, default=64, show_default=True, help="The same for a draft step.")
@click.option(
    "--draft-price",
    type=float,
    default=0.15,
    show_default=True,
    help="Price of a drafter relative to a target.",
)
@click.option("--max-drafters", type=IntRange(1, 64), default=8, show_default=True)
def size(max_drafters: int, **given: float) -> None:
    """Predict the speedup of drafters from measurements, with the cost model of gammaray.maths.theory."""
    sizing = Sizing(**given)  # type: ignore[arg-type]
    console = output_console(WIDTH)
    best = sizing.best(max_drafters)
    console.print(_drafters(sizing, max_drafters, best.drafters))
    console.print(_drafts(sizing, max(1, best.drafters)))
    console.print(_network(sizing, max(1, best.drafters)))


def _drafters(sizing: Sizing, max_drafters: int, best: int) -> Table:
    table = Table(
        "drafters",
        "gamma",
        "tokens/s",
        "speedup",
        "tokens for the money",
        title="Drafters per target",
        min_width=WIDTH,
    )
    for number in range(max_drafters + 1):
        choice = sizing.choose(number)
        mark = " <- best" if number == best else ""
        table.add_row(
            str(number),
            str(choice.gamma),
            f"{choice.tokens_per_s:.0f}",
            f"{choice.speedup:.2f}",
            f"{choice.value:.2f}{mark}",
        )
    return table


def _drafts(sizing: Sizing, drafters: int) -> Table:
    costs = (f"{cost:g}" for cost in DRAFT_COSTS)
    table = Table("alpha", *costs, title=f"Speedup by draft step / target pass, {drafters} drafter(s)")
    for alpha in ALPHAS:
        cells = []
        for cost in DRAFT_COSTS:
            choice = replace(sizing, alpha=alpha, draft_ms=cost * sizing.target_ms).choose(drafters)
            cells.append(f"{choice.speedup:.2f} (gamma {choice.gamma})")
        table.add_row(f"{alpha:g}", *cells)
    return table


def _network(sizing: Sizing, drafters: int) -> Table:
    until = f"as slow as plain decoding from {sizing.break_even_rtt_ms(drafters):.1f} ms on"
    table = Table(
        "network, ms",
        "gamma",
        "speedup",
        title=f"Speedup by network time, {drafters} drafter(s): {until}",
        min_width=WIDTH,
    )
    for rtt_ms in RTTS_MS:
        choice = replace(sizing, rtt_ms=rtt_ms).choose(drafters)
        table.add_row(f"{rtt_ms:g}", str(choice.gamma), f"{choice.speedup:.2f}")
    return table
