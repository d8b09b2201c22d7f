"""Drafters beside their target and at a distance from it: what each gains on the whole stack.

    python -m benchmarks.placement --target MODEL_DIR --in-target HEAD ... --remote HEAD_OR_DRAFT ...

Each drafter gets a cluster of its own: in the target worker, or on a draft worker behind a relay that adds
what `--delays` says to the round trip between orchestrator and draft worker. One prompt of each category of
`benchmarks.prompts` is completed by plain decoding, by the drafter with look-ups and an adaptive gamma (the
default), by a drafter in the target worker also alone, and, without delay, by proposals of a fixed number of
tokens. Speeds count from the first token and are divided by those of plain decoding in the same cluster,
repetition by repetition.

Exits with 1 when a completion differs from that of plain decoding.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console

from benchmarks.cluster import run_or_exit, running_cluster
from benchmarks.peers.figures import decode_speeds, ranged
from benchmarks.peers.run import encode
from benchmarks.peers.stacks import TracedStack
from benchmarks.prompts import CATEGORIES, load_tasks
from benchmarks.provenance import write_result
from benchmarks.relay import Relay
from benchmarks.timed_stack import worker_process
from gammaray import AsyncClient
from gammaray.bench.loops import without_loops
from gammaray.bench.measure import PLAIN, Samples, differences, measure
from gammaray.bench.systems import Ask, stack_name
from gammaray.bench.tables import plain_table
from gammaray.demo_pair import resolve_model
from gammaray.deploy.draft_heads import is_draft_head
from gammaray.wire.cycles import CycleRecord
from orchestrator.launcher.redis_server import RedisServer
from orchestrator.text.tokenizer import Tokenizer

__all__ = ["Placed", "cycle_figures", "main"]

_READY_TIMEOUT_S = 120.0
ALONE, MIXED = "gammaray-alone", "gammaray-adaptive"


@dataclass(frozen=True)
class Placed:
    """A drafter and its place.

    Args:
        drafter: Directory of a head or draft model.
        is_remote: Whether it is on a draft worker, else in the target worker.
        weights: auto, int8 or int4.
    """

    drafter: str
    is_remote: bool
    weights: str

    @classmethod
    def parse(cls, text: str, *, is_remote: bool) -> Placed:
        """Return what `DIR` or `DIR:WEIGHTS` names."""
        drafter, separator, weights = text.rpartition(":")
        return cls(drafter, is_remote, weights) if separator else cls(text, is_remote, "auto")


def cycle_figures(cycles: Sequence[CycleRecord]) -> dict[str, Any]:
    """Return what the cycles say of a drafter; those without a proposal of it are left out.

    Returns:
        `alpha`: acceptance of the first, second, ... token among those tested; `tokens_per_cycle`;
        `draft_ms` and `target_ms`: computing time of both workers in a cycle, the mean; `wire_bytes`: blocks
        and answers of both in a cycle, the median, as the first cycle carries the prompt. A drafter in the
        target worker has no draft time of its own: None.
    """
    drafted = [cycle for cycle in cycles if cycle.tested and cycle.drafter.is_model]
    if not drafted:
        return {
            "alpha": [],
            "tokens_per_cycle": None,
            "draft_ms": None,
            "target_ms": None,
            "wire_bytes": None,
        }
    alpha = []
    for depth in range(max(cycle.tested for cycle in drafted)):
        reached = [cycle.accepted > depth for cycle in drafted if cycle.tested > depth]
        alpha.append(mean(reached) if reached else 0.0)
    sizes = [
        sum(call.request_bytes + call.response_bytes for call in (cycle.draft, cycle.target) if call)
        for cycle in drafted
    ]
    draft = [cycle.draft.compute_s for cycle in drafted if cycle.draft is not None]
    return {
        "alpha": alpha,
        "tokens_per_cycle": mean(cycle.emitted for cycle in drafted),
        "draft_ms": mean(draft) * 1e3 if draft else None,
        "target_ms": mean(cycle.target.compute_s for cycle in drafted if cycle.target is not None) * 1e3,
        "wire_bytes": median(sizes),
    }


async def measure_placed(
    placed: Placed, options: argparse.Namespace, asks: Sequence[Sequence[Ask]], console: Console
) -> list[dict[str, Any]]:
    """Run a drafter's cluster and return its points, by delay and temperature."""
    async with AsyncExitStack() as exits:
        directory = exits.enter_context(tempfile.TemporaryDirectory())
        redis = exits.enter_context(RedisServer.start(Path(directory)))
        up = ["--target", options.target, "--redis-url", redis.url, "--draft-workers", "0"]
        if not placed.is_remote:
            up += ["--head", placed.drafter, "--draft-weights", placed.weights]
        os.environ["GAMMARAY_FEATURES"] = (
            placed.drafter if placed.is_remote and is_draft_head(placed.drafter) else ""
        )
        cluster = await exits.enter_async_context(running_cluster(*up))
        client = await exits.enter_async_context(AsyncClient(cluster.grpc_address))
        await client.wait_ready(_READY_TIMEOUT_S, roles=("target",))
        relay = None
        if placed.is_remote:
            # The worker announces the relay's address, and its own port is known only afterwards.
            relay = exits.enter_context(closing(Relay()))
            address, _ = exits.enter_context(
                worker_process(
                    *("draft", "--model", placed.drafter, "--target-model", options.target),
                    *("--draft-weights", placed.weights, "--redis-url", redis.url),
                    *("--advertise", relay.address),
                )
            )
            relay.start(address)
            await client.wait_ready(_READY_TIMEOUT_S, roles=("target", "draft"))
        points = []
        delays = options.delays if relay is not None else (0.0,)
        for delay_ms, of_temperature in product(delays, asks):
            if relay is not None:
                relay.delay_s = delay_ms / 1e3
            point = await _point(placed, client, options, of_temperature, delay_ms)
            points.append(point)
            console.print(_line(point))
        return points


async def _point(
    placed: Placed, client: AsyncClient, options: argparse.Namespace, asks: Sequence[Ask], delay_ms: float
) -> dict[str, Any]:
    kind = "model" if placed.is_remote else "head"
    fixed = stack_name(options.gamma)
    systems = [TracedStack(0, client), TracedStack("adaptive", client, name=MIXED)]
    if not placed.is_remote:  # a request cannot ask for a draft worker without look-ups
        systems.append(TracedStack("adaptive", client, options={"drafter": kind}, name=ALONE))
    if not delay_ms:
        systems.append(TracedStack(options.gamma, client, options={"drafter": kind}))
    shuffle = random.Random(options.seed)
    samples = await measure(systems, asks, options.repetitions, lambda: None, 1, shuffle)
    plain = decode_speeds(samples[PLAIN])
    assert plain is not None
    point: dict[str, Any] = {
        "drafter": placed.drafter,
        "weights": placed.weights,
        "place": "draft worker" if placed.is_remote else "target worker",
        "added_ms": delay_ms,
        "temperature": asks[0].temperature,
        "plain_tokens_per_s": ranged(plain),
        "equality": differences(samples, {system.name: PLAIN for system in systems[1:]}),
        "loops": without_loops(samples)[1],
    }
    for system in systems[1:]:
        speeds = decode_speeds(samples[system.name])
        over = [own / base for own, base in zip(speeds or (), plain, strict=True)]
        cycles = await _cycles(client, samples, system.name)
        name = "fixed" if system.name == fixed else system.name.removeprefix("gammaray-")
        point[name] = {"over_plain": ranged(over), **cycle_figures(cycles)}
    return point


async def _cycles(client: AsyncClient, samples: Samples, system: str) -> list[CycleRecord]:
    found: list[CycleRecord] = []
    for turns in samples[system]:
        for turn in turns:
            for sample in turn.samples:
                found += await client.session_trace(sample.session_id)
    return found


def _line(point: dict[str, Any]) -> str:
    return (
        f"{point['drafter']} {point['weights']}, {point['place']}, + {point['added_ms']:g} ms, "
        f"temperature {point['temperature']:g}: {point['adaptive']['over_plain']['median']:.2f}"
    )


async def measure_all(placed: Sequence[Placed], options: argparse.Namespace) -> dict[str, Any]:
    """Measure all drafters, one cluster after another."""
    os.environ["GAMMARAY_THREADS"] = "1"
    tokenizer = Tokenizer(resolve_model(options.target, "target"))
    prompts = encode(tokenizer, load_tasks(CATEGORIES, options.prompts))
    asks = [
        [Ask(prompt, options.tokens, temperature, seed) for seed, prompt in enumerate(prompts)]
        for temperature in (0.0, 1.0)
    ]
    console = Console(width=140)
    points: list[dict[str, Any]] = []
    for one in placed:
        points += await measure_placed(one, options, asks, console)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    return {"settings": settings, "points": points}


def table(points: Sequence[dict[str, Any]]) -> Any:
    """Return one row per point: speeds over plain decoding, and what the fixed proposals show."""
    headings = (
        "drafter",
        "place",
        "T",
        "+ ms",
        "alone",
        "with look-ups",
        "alpha",
        "tok/cycle",
        "draft ms",
        "bytes",
    )
    found = plain_table("Speed over plain decoding, after the first token", headings)
    for point in points:
        fixed = point.get("fixed")
        shown = ("", "", "", "")
        if fixed is not None and fixed["alpha"]:
            alpha = " ".join(f"{value:.2f}" for value in fixed["alpha"])
            draft = "" if fixed["draft_ms"] is None else f"{fixed['draft_ms']:.1f}"
            shown = (alpha, f"{fixed['tokens_per_cycle']:.2f}", draft, f"{fixed['wire_bytes']:.0f}")
        found.add_row(
            *(f"{point['drafter']} {point['weights']}", point["place"]),
            *(f"{point['temperature']:g}", f"{point['added_ms']:g}"),
            *(_ranged(point[name]["over_plain"]) if name in point else "" for name in ("alone", "adaptive")),
            *shown,
        )
    return found


def _ranged(figure: dict[str, Any]) -> str:
    return f"{figure['median']:.2f} ({figure['least']:.2f}-{figure['largest']:.2f})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.placement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, help="model directory")
    drafter = {"action": "append", "default": [], "metavar": "DIR[:WEIGHTS]"}
    parser.add_argument("--in-target", **drafter, help="head or draft model in the target worker; repeatable")
    parser.add_argument("--remote", **drafter, help="head or draft model on a draft worker; repeatable")
    parser.add_argument(
        "--delays", default="0,2,10,40", help="added to the round trip, ms; default 0,2,10,40"
    )
    parser.add_argument("--gamma", type=int, default=4, help="of the fixed proposals; default 4")
    parser.add_argument("--prompts", type=int, default=1, help="per category; default 1")
    parser.add_argument("--tokens", type=int, default=64, help="per completion; default 64")
    parser.add_argument("--repetitions", type=int, default=3, help="default 3")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the systems; default 0")
    parser.add_argument("--out", type=Path, help="new result file; default: in benchmarks/results")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the result."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.out is not None and options.out.exists():
        parser.error(f"--out: {options.out} exists")
    try:
        options.delays = [float(text) for text in options.delays.split(",")]
    except ValueError:
        parser.error(f"--delays: got {options.delays!r}, allowed: numbers of milliseconds")
    placed = [
        *(Placed.parse(text, is_remote=False) for text in options.in_target),
        *(Placed.parse(text, is_remote=True) for text in options.remote),
    ]
    if not placed:
        parser.error("--in-target or --remote: at least one drafter")
    result = run_or_exit(measure_all(placed, options))
    Console(width=160).print(table(result["points"]))
    print(f"written: {write_result('placement', result, options.out)}")
    equality = [point["equality"] for point in result["points"]]
    sys.exit(any(found["equal"] != found["compared"] for found in equality))


if __name__ == "__main__":
    main()
