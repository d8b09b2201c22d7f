"""A `--network` run: troubles one after the other under load, and what each client got meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos.chaos_drafters import PAIR
from tests.chaos.load import asks, reference, streams
from tests.chaos.network.histories import Clients
from tests.chaos.network.links import Link, Network
from tests.chaos.network.network_redis import network_redis, small_disk
from tests.chaos.network.spans import Measured, Span, line, longest_pause, measured, progress, result_of
from tests.chaos.network.troubles import Stage, Trouble, troubles
from tests.support.cluster.cluster_helpers import Cluster, running_cluster

CALM_S = 1.5
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


@contextmanager
def stage_of(stderr: int | None = None, each: int = 2) -> Iterator[tuple[Stage, Cluster]]:
    """Start a cluster whose links can fail, with so many orchestrators and workers of each role."""
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        redis = stack.enter_context(network_redis(network))
        folder = _short_directory()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        disk = stack.enter_context(small_disk(folder, CLUSTER_MB))
        counts = itertools.chain.from_iterable(
            (f"--{name}", str(each)) for name in ("orchestrators", "target-workers", "draft-workers")
        )
        with _temporary_files_in(folder):
            cluster = stack.enter_context(
                running_cluster("--deterministic", "--redis-url", redis.url, *counts, stderr=stderr)
            )
        yield Stage(network, redis, links_to(cluster, network), cluster.launcher.pid, disk), cluster


def links_to(cluster: Cluster, network: Network) -> dict[str, Link]:
    """Return links to both APIs of a cluster."""
    addresses = {"grpc": cluster.grpc, "http": cluster.http}
    return {name: network.link(int(address.rpartition(":")[2])) for name, address in addresses.items()}


def _short_directory() -> Path:
    """Create a directory with a path that is short enough for the launcher's sockets."""
    for number in range(10):
        with contextlib.suppress(FileExistsError):
            (folder := Path(f"/tmp/g{number}")).mkdir()
            return folder
    raise AssertionError("/tmp/g0 to /tmp/g9 exist")


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
) -> Measured:
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
    await progress(clients, time.monotonic())
    start = time.monotonic()
    await asyncio.sleep(3.0)
    usual_pause_s = longest_pause(clients, start, time.monotonic())
    for trouble in _plan(stage, options):
        if time.monotonic() - start > options.seconds and (options.seconds or spans):
            break
        await asyncio.sleep(CALM_S)
        spans.append(await _carry_out(stage, trouble, clients))
        result = result_of(spans[-1], clients)
        say(f"{spans[-1].began - start:6.1f} s  {line(result)}")
    seconds = time.monotonic() - start
    await clients.end()
    return measured(spans, clients, seconds, usual_pause_s)


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
    return Span(trouble.name, began, ended, await progress(clients, ended))


def network_figures(outcome: Measured, options: NetworkOptions) -> dict[str, object]:
    return {"options": asdict(options), **asdict(outcome)}
