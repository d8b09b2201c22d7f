"""A `--network` run: troubles one after the other under load, and what each client got meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.chaos.chaos_drafters import PAIR
from tests.chaos.load import asks, reference, streams
from tests.chaos.network.histories import Clients, errors_of
from tests.chaos.network.links import Network
from tests.chaos.network.network_redis import network_redis, small_disk
from tests.chaos.network.troubles import Stage, Trouble, troubles
from tests.chaos.pauses import WINDOW_S
from tests.support.cluster.cluster_helpers import Cluster, running_cluster

CALM_S = 1.5
PROGRESS_S = 30.0
"""After a trouble every stream gets a token again within this, or it counts as a violation."""

CLUSTER_MB = 256


@dataclass(frozen=True)
class NetworkOptions:
    """Options of a run.

    Args:
        seconds: After which no further trouble begins; every trouble comes once before one comes again.
        seed: Of their order.
        streams: Clients over gRPC.
        over_http: Clients over HTTP.
        max_tokens: Of each completion.
        deadline_s: Of each request.
        names: Beginnings of the names of the troubles; empty: all.
    """

    seconds: float = 600.0
    seed: int = 0
    streams: int = 10
    over_http: int = 4
    max_tokens: int = 200
    deadline_s: float = 60.0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """What one trouble did; seconds.

    Attributes:
        streams: Requests that it met.
        lost, repeated, changed: Those whose tokens were.
        errors: Typed errors that ended requests, by type.
        pause_s: Longest time without a token of any stream.
        back_s: From its end until every stream had a token.
    """

    name: str
    streams: int
    lost: int
    repeated: int
    changed: int
    errors: dict[str, int]
    pause_s: float
    back_s: float


@dataclass
class NetworkOutcome:
    """Outcome of a run."""

    results: list[Result]
    violations: list[str]
    requests: int
    finished: int
    errors: Counter[str]
    seconds: float
    usual_pause_s: float


@dataclass(frozen=True)
class Span:
    """When a trouble began and ended, and when all streams had tokens again."""

    trouble: Trouble
    began: float
    ended: float
    back: float


@contextmanager
def stage_of(stderr: int | None = None, each: int = 2) -> Iterator[tuple[Stage, Cluster]]:
    """Start a cluster whose links can fail, with so many orchestrators and workers of each role."""
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        redis = stack.enter_context(network_redis(network))
        folder = Path(stack.enter_context(TemporaryDirectory(dir="/tmp", prefix="g-")))
        disk = stack.enter_context(small_disk(folder, CLUSTER_MB))
        counts = itertools.chain.from_iterable(
            (f"--{name}", str(each)) for name in ("orchestrators", "target-workers", "draft-workers")
        )
        with _temporary_files_in(folder):
            cluster = stack.enter_context(
                running_cluster("--deterministic", "--redis-url", redis.url, *counts, stderr=stderr)
            )
        apis = {
            name: network.link(int(address.rpartition(":")[2]))
            for name, address in (("grpc", cluster.grpc), ("http", cluster.http))
        }
        yield Stage(network, redis, apis, cluster.launcher.pid, disk), cluster


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)


async def run(
    stage: Stage, cluster: Cluster, options: NetworkOptions, say: Callable[[str], None]
) -> NetworkOutcome:
    wanted = asks(options.streams, options.max_tokens)
    say(
        f"{options.streams} streams over gRPC, {options.over_http} over HTTP; first plain and undisturbed ..."
    )
    expected = await reference(cluster.grpc, wanted)
    grpc, http = (f"127.0.0.1:{stage.apis[name].port}" for name in ("grpc", "http"))
    clients = Clients(
        grpc, f"http://{http}", streams(wanted, PAIR), expected, options.deadline_s, options.over_http
    )
    clients.start()
    spans: list[Span] = []
    await _progress(clients, time.monotonic())
    start = time.monotonic()
    await asyncio.sleep(3.0)
    usual_pause_s = _pause(clients, start, time.monotonic())
    for trouble in _plan(stage, options):
        if time.monotonic() - start > options.seconds and (options.seconds or spans):
            break
        await asyncio.sleep(CALM_S)
        spans.append(await _carry_out(stage, trouble, clients))
        result = _result(spans[-1], clients)
        say(f"{spans[-1].began - start:6.1f} s  {_line(result)}")
    seconds = time.monotonic() - start
    await clients.end()
    unmoved = [span for span in spans if span.back - span.ended > PROGRESS_S]
    return NetworkOutcome(
        results=[_result(span, clients) for span in spans],
        violations=clients.violations()
        + [f"{span.trouble.name}: no progress within {PROGRESS_S:g} s after it" for span in unmoved],
        requests=len(clients.histories),
        finished=sum(not one.error and not one.wrong for one in clients.histories),
        errors=errors_of(clients.histories),
        seconds=seconds,
        usual_pause_s=usual_pause_s,
    )


def _plan(stage: Stage, options: NetworkOptions) -> Iterator[Trouble]:
    known = troubles(stage)
    chosen = [one for one in known if not options.names or one.name.startswith(options.names)]
    rng = random.Random(options.seed)
    while chosen:
        yield from rng.sample(chosen, len(chosen))
        if options.names:
            return


async def _carry_out(stage: Stage, trouble: Trouble, clients: Clients) -> Span:
    def last() -> tuple[float, float]:
        began = time.monotonic()
        with trouble.during(stage):
            time.sleep(trouble.seconds)
            ended = time.monotonic()
        return began, ended

    began, ended = await asyncio.to_thread(last)
    return Span(trouble, began, ended, await _progress(clients, ended))


async def _progress(clients: Clients, moment: float) -> float:
    """Return when every stream had a token since a time; gives up after a while."""
    while not clients.all_moved_since(moment) and time.monotonic() < moment + PROGRESS_S + 5:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return time.monotonic()


def _pause(clients: Clients, began: float, ended: float) -> float:
    """Return the longest time without a token in a span, of any stream."""
    longest = 0.0
    for times in clients.arrivals:
        inside = [time for time in times if began < time < ended]
        longest = max(longest, *(b - a for a, b in itertools.pairwise([began, *inside, ended])))
    return longest


def _result(span: Span, clients: Clients) -> Result:
    met = [
        one
        for one in clients.histories
        if one.begun_at < span.back and not (one.ended_at and one.ended_at < span.began)
    ]
    kinds = Counter(one.kind for one in met)
    return Result(
        name=span.trouble.name,
        streams=len(met),
        lost=kinds["lost"],
        repeated=kinds["repeated"],
        changed=kinds["changed"],
        errors=dict(errors_of(met)),
        pause_s=_pause(clients, span.began, span.back + WINDOW_S),
        back_s=span.back - span.ended,
    )


def _line(result: Result) -> str:
    errors = ", ".join(f"{count} {name}" for name, count in result.errors.items()) or "none"
    return (
        f"{result.name}: {result.streams} streams, {result.lost} lost, {result.repeated} repeated, "
        f"{result.changed} changed, typed errors: {errors}; pause {result.pause_s:.2f} s, "
        f"all had tokens {result.back_s:.2f} s after it"
    )


def table(outcome: NetworkOutcome) -> str:
    head = ("trouble", "streams", "lost", "repeated", "changed", "errors", "longest pause", "back after")
    rows = [head]
    for name in sorted({one.name for one in outcome.results}):
        same = [one for one in outcome.results if one.name == name]
        sums = (sum(getattr(one, key) for one in same) for key in ("streams", "lost", "repeated", "changed"))
        errors = sum(sum(one.errors.values()) for one in same)
        pause, back = max(one.pause_s for one in same), max(one.back_s for one in same)
        rows.append((name, *map(str, sums), str(errors), f"{pause:.2f} s", f"{back:.2f} s"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    errors = ", ".join(f"{count} {name}" for name, count in outcome.errors.items()) or "none"
    return "\n".join(
        [
            *lines,
            "",
            f"{len(outcome.results)} troubles in {outcome.seconds:.0f} s: {outcome.requests} requests, "
            f"{outcome.finished} with all tokens of plain decoding; typed errors: {errors}; "
            f"longest pause before the first trouble {outcome.usual_pause_s:.2f} s",
            *(f"violation: {one}" for one in outcome.violations),
        ]
    )


def network_figures(outcome: NetworkOutcome, options: NetworkOptions) -> dict[str, object]:
    return {"options": asdict(options), **asdict(outcome)}
