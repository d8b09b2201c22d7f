"""The fuzzers together, against one cluster."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from gammaray import Client
from orchestrator.launcher.redis_server import RedisServer
from tests.fuzz.campaign import Campaign
from tests.fuzz.census import growth, settled
from tests.fuzz.grpc_fuzz import fuzz_public, fuzz_worker
from tests.fuzz.hostile import fuzz_with_hostile_drafter, fuzz_with_hostile_target
from tests.fuzz.http_fuzz import fuzz_http
from tests.fuzz.limits import FIELDS, grow_fields
from tests.fuzz.openapi_fuzz import fuzz_openapi
from tests.support.cluster.cluster_helpers import Cluster

NUM_HTTP, NUM_GRPC = 3, 3
END_TIMEOUT_S = 75.0
"""How long the last calls may take when the time is up."""

LIMITS_SHARE = 0.5
"""Of the time, for growing fields."""

WARM_UP_S = (3.0, 60.0)
"""Bounds of how long the cluster is fuzzed before its memory is looked at for the first time."""


def run(cluster: Cluster, seconds: float, seed: int) -> Campaign:
    """Fuzz a cluster: a short warm-up, then for `seconds`, then compare its resources.

    In the last part of the time fields are grown, one request at a time.
    """
    warm_up_s = min(max(WARM_UP_S[0], seconds / 5), WARM_UP_S[1])
    campaign = Campaign(warm_up_s, seed + 1)
    with TemporaryDirectory() as directory, RedisServer.start(Path(directory)) as redis:
        asyncio.run(_fuzz(cluster, redis, campaign, seed + 1))
        before = settled(cluster.status)
        print(f"warmed up in {warm_up_s:g} s, {sum(campaign.counts.values())} calls", flush=True)
        campaign.begin((1 - LIMITS_SHARE) * seconds, seed)
        asyncio.run(_fuzz(cluster, redis, campaign, seed))
    campaign.begin(LIMITS_SHARE * seconds, seed)
    fields = asyncio.run(grow_fields(cluster, campaign))
    print(f"{len(fields)} of {len(FIELDS)} fields grown to their limits beside a canary stream", flush=True)
    for complaint in growth(before, settled(cluster.status, before)):
        campaign.blame(complaint)
    _check_alive(cluster, campaign)
    return campaign


async def _fuzz(cluster: Cluster, redis: RedisServer, campaign: Campaign, seed: int) -> None:
    addresses = {p.role: p.address for p in cluster.status() if p.role in ("target", "draft")}
    work = {f"http {i}": fuzz_http(cluster.http, campaign, f"http {i}") for i in range(NUM_HTTP)}
    work |= {f"grpc {i}": fuzz_public(cluster.grpc, campaign, f"grpc {i}") for i in range(NUM_GRPC)}
    work |= {f"{role} stream": fuzz_worker(addresses[role], role, campaign, role) for role in addresses}
    work["schemathesis"] = fuzz_openapi(cluster.http, campaign, seed)
    work["hostile drafter"] = fuzz_with_hostile_drafter(redis, addresses["target"], campaign)
    work["hostile target"] = fuzz_with_hostile_target(redis, campaign)
    tasks = [asyncio.create_task(campaign.guard(name, fuzzer), name=name) for name, fuzzer in work.items()]
    _, stuck = await asyncio.wait(tasks, timeout=campaign.left_s + END_TIMEOUT_S)
    for task in stuck:
        campaign.blame(f"{task.get_name()} does not end: it waits in {_innermost(task)}")
        task.cancel()
    await asyncio.wait(tasks, timeout=END_TIMEOUT_S)


def _innermost(task: asyncio.Task[None]) -> str:
    """Return where a task waits: file and line of each coroutine on the way down."""
    found, waiting = [], task.get_coro()
    while waiting is not None:
        frame = next((f for name in ("cr_frame", "ag_frame") if (f := getattr(waiting, name, None))), None)
        if frame is not None:
            found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "ag_await", None)
    return " > ".join(found)


def _check_alive(cluster: Cluster, campaign: Campaign) -> None:
    with Client(cluster.grpc) as client:
        if len(client.complete("x = ", max_tokens=4, ignore_eos=True).tokens) != 4:
            campaign.blame("the gRPC API does not complete any more")
    answer = httpx.post(f"{cluster.http}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60)
    if answer.status_code != 200:
        campaign.blame(f"the HTTP API does not complete any more: {answer.text}")
