"""`gammaray size`: choose drafter, device, number of drafters per target, and network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import click
from rich.console import Console
from rich.table import Table

from gammaray.checks import check_number
from gammaray.cli.output import output_console
from gammaray.cli.values import FloatRange, IntRange, list_of
from gammaray.errors import InvalidArgumentError
from gammaray.maths.drafters import Drafter, Kind, Load, drafters_for
from gammaray.maths.hardware import BITS, DEVICES, MODELS, Device, Placement, find_device, find_model
from gammaray.maths.sizing import Sizing

__all__ = ["size"]

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
CARDS = ("T4", "L4", "A10", "L40S", "RTX-4090")
DRAFT_COSTS = (0.02, 0.05, 0.1, 0.2, 0.4)
WIDTH = 110
RTTS_MS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)

_weights = click.Choice(list(BITS))


@click.command()
@click.option(
    "--alpha", type=float, help="Accepted per tested token, as reported by `gammaray bench`.  [default: 0.7]"
)
@click.option("--target-ms", type=float, help="One target pass, in milliseconds, as measured.")
@click.option("--draft-ms", type=float, help="One draft pass, in milliseconds, as measured.")
@click.option("--rtt-ms", type=float, default=0.5, show_default=True, help="Network time of a cycle.")
@click.option("--sessions", type=int, default=32, show_default=True, help="Concurrent sessions per target.")
@click.option(
    "--target-tokens",
    type=int,
    help="Tokens that a target pass verifies at no extra cost.  [default: 256, or by --on]",
)
@click.option("--draft-tokens", type=int, help="The same for a draft pass.  [default: 64, or by --card]")
@click.option(
    "--draft-price",
    type=float,
    help="Price of a drafter relative to a target.  [default: 0.15, or by --card and --on]",
)
@click.option("--max-drafters", type=IntRange(1, 64), default=8, show_default=True)
@click.option(
    "--target", help=f"Instead of --target-ms: {', '.join(MODELS)}, or a number of parameters such as 1.2B."
)
@click.option("--target-weights", type=_weights, default="bf16", show_default=True)
@click.option("--on", help=f"Devices of a target: {', '.join(DEVICES)}, or 4xH100 for four.")
@click.option("--draft", default="llama-3.2-1b", show_default=True, help="Draft model, as --target.")
@click.option("--draft-weights", type=_weights, default="bf16", show_default=True, help="With --card.")
@click.option(
    "--drafter",
    type=click.Choice([kind.value for kind in Kind if kind not in (Kind.TEXT, Kind.HEAD)]),
    default=Kind.PLAIN.value,
    show_default=True,
    help="With --card: the draft makes a pass per token (plain), or one per proposal (parallel); or the "
    "target's first layers draft (early-exit).",
)
@click.option("--exit-layers", type=IntRange(1), help="Layers of the early exit.  [default: a quarter]")
@click.option("--card", help="Device of the drafters: sizes one drafter; without it, all are compared.")
@click.option(
    "--cards", default=",".join(CARDS), show_default=True, callback=list_of(str, "names of devices")
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    help="Price of a device in US dollars per hour, such as L4=0.5; repeatable.  [default: assumed]",
)
@click.option("--context", type=int, default=1024, show_default=True, help="Tokens per session.")
@click.option("--text-alpha", type=float, default=0.35, show_default=True, help="Alpha of look-ups.")
@click.option(
    "--rate",
    type=FloatRange(0, 1e6, min_open=True),
    default=100.0,
    show_default=True,
    help="Tokens per second that each session must get, for the capacity.",
)
def size(
    alpha: float | None,
    target_ms: float | None,
    draft_ms: float | None,
    rtt_ms: float,
    sessions: int,
    target_tokens: int | None,
    draft_tokens: int | None,
    draft_price: float | None,
    max_drafters: int,
    target: str | None,
    target_weights: str,
    on: str | None,
    draft: str,
    draft_weights: str,
    drafter: str,
    exit_layers: int | None,
    card: str | None,
    cards: tuple[str, ...],
    prices: tuple[str, ...],
    context: int,
    text_alpha: float,
    rate: float,
) -> None:
    """Predict which drafter pays on which device, or the gain of one drafter.

    The times are measured (--target-ms, --draft-ms) or computed from the models and devices (--target, --on).
    With --card, or with measured times, the number of drafters and the network of one drafter are sized.
    """
    console = output_console(WIDTH)
    if target is None:
        given = {"--alpha": alpha, "--target-ms": target_ms, "--draft-ms": draft_ms}
        if alpha is None or target_ms is None or draft_ms is None:
            missing = ", ".join(name for name, value in given.items() if value is None)
            raise click.UsageError(f"Missing {missing}; or give --target and --on to compute the times.")
        sizing = Sizing(
            alpha,
            target_ms,
            draft_ms,
            rtt_ms,
            sessions,
            target_tokens if target_tokens is not None else 256,
            draft_tokens if draft_tokens is not None else 64,
            draft_price if draft_price is not None else 0.15,
        )
        _print_one(console, lambda drafters: sizing, max_drafters)
        return
    if target_ms is not None or draft_ms is not None or on is None:
        raise click.UsageError("--target needs --on, and excludes --target-ms and --draft-ms.")
    priced = dict(map(_price, prices))
    device, devices = find_device(on)
    device = priced.get(device.name, device)
    placement = Placement(find_model(target), target_weights, device, devices)
    load = Load(placement, 0.7 if alpha is None else alpha, text_alpha, rtt_ms, context)
    candidates = drafters_for(placement.model, find_model(draft), exit_layers)
    if card is None:
        devices_of_drafts = [_one_device(name, priced) for name in cards]
        _print_all(console, load, candidates, devices_of_drafts, sessions, rate, max_drafters)
        return
    kind = Kind(drafter)
    chosen = next((one for one in candidates if one.kind is kind), None)
    if chosen is None:
        raise InvalidArgumentError("target", target, f"for {kind.value} one of {', '.join(MODELS)}")
    chosen = replace(chosen, weights=draft_weights)
    given_limits = {"target_tokens": target_tokens, "draft_tokens": draft_tokens, "draft_price": draft_price}
    changed = {name: value for name, value in given_limits.items() if value is not None}

    device_of_draft = _one_device(card, priced)

    def of(drafters: int) -> Sizing | None:
        sizing = load.sizing(chosen, device_of_draft, sessions, drafters or max_drafters)
        return None if sizing is None else replace(sizing, **changed)  # type: ignore[arg-type]

    if of(max_drafters) is None:
        allowed = f"what {max_drafters} x {device_of_draft.name} have memory for"
        raise InvalidArgumentError("sessions", sessions, allowed)
    assert chosen.model is not None
    drafting = Placement(chosen.model, draft_weights, device_of_draft)
    console.print(
        f"passes without KV caches: target {placement.pass_ms():.1f} ms ({_named(placement)}), "
        f"draft {drafting.pass_ms():.1f} ms ({chosen.name} on {device_of_draft.name})\n"
    )
    _print_one(console, of, max_drafters)


def _price(text: str) -> tuple[str, Device]:
    """Return the device with its price, by its name."""
    name, _, price = text.partition("=")
    try:
        dollars = float(price)
        check_number("price", dollars, 0.0, 1e6, open_low=True)
    except ValueError:
        raise InvalidArgumentError("price", repr(text), "a device and its price, such as L4=0.5") from None
    device = replace(find_device(name)[0], price_per_h=dollars)
    return device.name, device


def _one_device(name: str, priced: Mapping[str, Device]) -> Device:
    device, number = find_device(name)
    if number != 1:
        raise InvalidArgumentError("card", repr(name), "one device per drafter, such as L4")
    return priced.get(device.name, device)


def _named(placement: Placement) -> str:
    number = f"{placement.devices} x " if placement.devices > 1 else ""
    return f"{placement.model.name} {placement.weights} on {number}{placement.device.name}"


def _print_one(console: Console, of: Callable[[int], Sizing | None], max_drafters: int) -> None:
    """Print the three tables; `of` returns the sizing of a number of drafters, None if they are too few."""
    sizings = {number: found for number in range(max_drafters + 1) if (found := of(number)) is not None}
    choices = [found.choose(number) for number, found in sizings.items()]
    best = max(choices, key=lambda choice: choice.value).drafters
    table = Table(
        "drafters",
        "gamma",
        "tokens/s",
        "speedup",
        "tokens for the money",
        title="Drafters per target",
        min_width=WIDTH,
    )
    for choice in choices:
        mark = " <- best" if choice.drafters == best else ""
        table.add_row(
            str(choice.drafters),
            str(choice.gamma),
            f"{choice.tokens_per_s:.0f}",
            f"{choice.speedup:.2f}",
            f"{choice.value:.2f}{mark}",
        )
    console.print(table)
    drafters = max(best, min(number for number in sizings if number > 0))
    console.print(_drafts(sizings[drafters], drafters))
    console.print(_network(sizings[drafters], drafters))


def _print_all(
    console: Console,
    load: Load,
    candidates: Sequence[Drafter],
    cards: Sequence[Device],
    sessions: int,
    rate: float,
    max_drafters: int,
) -> None:
    target = load.target
    rows = {one.name: one for one in candidates}

    def grid(title: str, cell: Callable[[Drafter, Device], str]) -> None:
        table = Table("", *(card.name for card in cards), title=title, min_width=WIDTH)
        for name, one in rows.items():
            table.add_row(name, *(cell(one, card) for card in cards))
        console.print(table)

    def pass_ms(one: Drafter, card: Device) -> str:
        if one.model is None:
            return "0"
        placement = Placement(one.model, one.weights, load.target.device if one.is_local else card)
        return f"{placement.pass_ms():.1f}" if placement.max_sessions(load.context) else "too large"

    def gain(number: int) -> Callable[[Drafter, Device], str]:
        def cell(one: Drafter, card: Device) -> str:
            sizing = load.sizing(one, card, number)
            if sizing is None:
                return "too large"
            choice = sizing.choose(1)
            return f"{choice.speedup:.2f} (gamma {choice.gamma})" if choice.gamma else "-"

        return cell

    def least(one: Drafter, card: Device) -> str:
        alpha = load.least_alpha(one, card)
        return "never" if alpha is None else f"{alpha:.2f}"

    alphas = f"alpha {load.alpha:g}, look-ups {load.text_alpha:g}"
    console.print(f"{_named(target)}: {target.pass_ms():.1f} ms per pass; - : plain decoding is faster\n")
    grid("One pass of the drafter, ms", pass_ms)
    grid(f"Speedup of one stream at {alphas}", gain(1))
    grid(f"Speedup at {sessions} sessions on one drafter, {alphas}", gain(sessions))
    grid("Alpha from which one stream is faster", least)
    console.print(_capacity(load, candidates, cards, rate, max_drafters))


def _capacity(
    load: Load, candidates: Sequence[Drafter], cards: Sequence[Device], rate: float, max_drafters: int
) -> Table:
    """Return the table of capacities, most sessions for the money first, each drafter on its best device.

    Drafters with which plain decoding is better at that load are left out.
    """
    target = load.target
    table = Table(
        "drafter",
        "drafters",
        "gamma",
        "sessions per target GPU",
        "$/h",
        "sessions per $/h",
        title=f"Capacity: each session gets {rate:g} tokens/s, at {load.context} tokens of context",
        min_width=WIDTH,
    )
    rows = [("plain decoding", load.capacity(None, cards[0], rate, max_drafters))]
    for one in candidates:
        each = [(card, load.capacity(one, card, rate, max_drafters)) for card in cards]
        card, best = max(each, key=lambda pair: pair[1].sessions_per_dollar)
        if best.gamma:
            rows.append((one.name if one.is_local else f"{one.name} on {card.name}", best))
    for name, capacity in sorted(rows, key=lambda row: -row[1].sessions_per_dollar):
        table.add_row(
            name,
            str(capacity.drafters),
            str(capacity.gamma),
            f"{capacity.sessions / target.devices:.4g}",
            f"{capacity.price_per_h:.2f}",
            f"{capacity.sessions_per_dollar:.1f}",
        )
    return table


def _drafts(sizing: Sizing, drafters: int) -> Table:
    costs = (f"{cost:g}" for cost in DRAFT_COSTS)
    table = Table("alpha", *costs, title=f"Speedup by draft pass / target pass, {drafters} drafter(s)")
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
