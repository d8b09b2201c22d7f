"""A run: rounds of mixed load with a census between them, and its outcome."""

import asyncio
import random
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import httpx
from grpc import RpcError
from redis import RedisError

from gammaray import GammarayError
from tests.chaos.load import generate
from tests.fuzz.campaign import Campaign, columns
from tests.soak.grpc_mix import GRPC_MIX, check
from tests.soak.http_mix import HTTP_MIX
from tests.soak.samples import ACTION_TIMEOUT_S, Apis, Expected, SampleError, first_said
from tests.soak.soak_census import Census, Observer
from tests.soak.tenants import Tenants
from tests.soak.trend import BOUNDS, MIN_COUNT, Trend, trend

CLUSTERS = {
    "auto": ("--deterministic",),
    "vllm": ("--engine", "vllm"),
    "learning": (
        "--deterministic",
        *("--target", "build/models/smollm2", "--head", "benchmarks/heads/smollm2"),
    ),
}
"""Options by engine, to which `Tenants` adds. Tokens must not depend on who else was in a batch: what is
compared here, is compared bit by bit. vLLM computes the same bits in every batch on GPUs only; elsewhere a
tie may fail a run."""

TTL_S = 30
"""Sessions stay in Redis for their TTL by design: short, so that their number is steady before the warm-up
ends, and long enough for everything here that comes back to a session."""

MIN_CENSUSES = 18
"""Six to each third, so that the medians of short runs mean something too."""

MAX_PAUSE_S = 0.4
EXPIRY_S = 5.0
"""How long after the TTL the last key is gone: Redis looks for expired keys ten times a second."""

UNREACHABLE = (GammarayError, RpcError, httpx.HTTPError, RedisError)
AT_REST = ("sessions", "queued", "kv_mb", "running")


@dataclass(frozen=True)
class Options:
    seconds: float = 1800.0
    seed: int = 0
    clients: int = 6
    round_s: float = 30.0


@dataclass
class Outcome:
    campaign: Campaign
    censuses: list[Census] = field(default_factory=list)
    slowest_s: dict[str, float] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    num_again: int = 0

    def trends(self) -> dict[tuple[str, str], Trend]:
        """Return the trends of bounded measures that all censuses have, by role and measure."""
        if len(self.censuses) < MIN_COUNT:
            return {}
        at_s = [census.at_s for census in self.censuses]
        return {
            key: trend(at_s, [census.figures[key] for census in self.censuses], BOUNDS[key[1]])
            for key in sorted(set.intersection(*(set(census.figures) for census in self.censuses)))
            if key[1] in BOUNDS
        }

    def complaints(self) -> list[str]:
        grown = [
            f"{role} {measure} grew: {found.before:.1f} -> {found.after:.1f}, allowed +{found.allowed:.1f}"
            for (role, measure), found in self.trends().items()
            if found.grows
        ]
        few = [f"{len(self.censuses)} censuses are too few to tell growth"] * (len(self.censuses) < MIN_COUNT)
        return [*few, *self._gone(), *grown, *self.left, *self.campaign.wrong]

    def _gone(self) -> list[str]:
        """Return the processes that died: a restarted process hides the growth of the one before it."""
        third = len(self.censuses) // 3
        if not third:
            return []
        seen = [_pids(census) for census in self.censuses[third : 2 * third]]
        lost = sorted(set.intersection(*seen) - _pids(self.censuses[-1]))
        return [f"{role} (process {pid}) is gone" for role, pid in lost]


async def run(apis: Apis, observer: Observer, options: Options, tenants: Tenants | None) -> Outcome:
    say = partial(print, flush=True)
    say("what the cluster says at the start ...")
    expected = await first_said(apis)
    campaign = Campaign(options.seconds, options.seed)
    outcome, start = Outcome(campaign), time.monotonic()
    dice = [campaign.dice(f"client {number}") for number in range(options.clients)]
    round_s = min(options.round_s, options.seconds / MIN_CENSUSES)
    num_said = 0
    for number in campaign.rounds():
        # Each census has load before it, also when the round before has run into this one.
        until = max(start + (number + 1) * round_s, time.monotonic() + round_s / 2)
        work = [_client(apis, expected, outcome, rng, until) for rng in dice]
        if tenants is not None:
            work.append(tenants.change(apis.grpc, campaign, campaign.dice(f"tenants {number}"), until))
        await asyncio.gather(*work)
        try:
            outcome.censuses.append(await observer.census(start))
        except UNREACHABLE as error:  # a process died; continue the run
            campaign.blame(f"no census: {type(error).__name__}: {error}")
            say(campaign.wrong[-1])
            continue
        say(_line(outcome.censuses[-1], campaign))
        for wrong in list(campaign.wrong)[num_said:]:
            say(f"wrong: {wrong}")
        num_said = len(campaign.wrong)
    say("what it says at the end ...")
    outcome.num_again = await _again(apis, expected, campaign)
    outcome.left = await _left(observer, start)
    if tenants is not None:
        outcome.left += await asyncio.to_thread(tenants.left)
    return outcome


async def _left(observer: Observer, start: float) -> list[str]:
    """Return descriptions of resources that are held after all sessions have expired."""
    await asyncio.sleep(TTL_S + EXPIRY_S)
    last = await observer.census(start)
    held = [(*key, value) for key, value in last.figures.items() if key[1] in AT_REST and value]
    left = [f"{role} holds {value:g} {measure} at the end" for role, measure, value in held]
    if keys := await asyncio.to_thread(observer.left_keys):
        left.append(f"{len(keys)} keys of sessions are left in Redis: {', '.join(keys[:3])} ...")
    return left


async def _client(apis: Apis, expected: Expected, outcome: Outcome, rng: random.Random, until: float) -> None:
    """Run requests one after the other over its own connections until a time; finish the last one."""
    async with apis.clients() as (client, web):
        surfaces: list[tuple[str, Any, Any]] = [("grpc", client, GRPC_MIX), ("http", web, HTTP_MIX)]
        while time.monotonic() < until:
            surface, connection, mix = rng.choice(surfaces)
            (action,) = rng.choices(list(mix), list(mix.values()))
            name, begun = f"{surface} {action.__name__}", time.monotonic()
            try:
                await asyncio.wait_for(action(connection, expected, rng), ACTION_TIMEOUT_S)
            except Exception as error:
                kind = type(error).__name__
                outcome.campaign.count(name, kind, wrong=f"{kind}: {error}")
            else:
                outcome.campaign.count(name, "right")
            outcome.slowest_s[name] = max(outcome.slowest_s.get(name, 0.0), time.monotonic() - begun)
            await asyncio.sleep(rng.uniform(0.0, MAX_PAUSE_S))


async def _again(apis: Apis, expected: Expected, campaign: Campaign) -> int:
    async with apis.clients() as (client, _):
        for ask in expected.completions:
            try:
                check(expected, ask, await generate(client, ask))
            except SampleError as error:
                campaign.count("at the end", "differs", wrong=str(error))
            else:
                campaign.count("at the end", "right")
    return len(expected.completions)


def _pids(census: Census) -> set[tuple[str, int]]:
    return {(role, pid) for role, pids in census.processes.items() for pid in pids}


def _line(census: Census, campaign: Campaign) -> str:
    held = {
        role: census.figures.get((role, "rss_mb")) for role in ("orchestrator", "draft", "target", "redis")
    }
    shown = [f"{role} {mb:.0f} MiB" for role, mb in held.items() if mb is not None]
    if (keys := census.figures.get(("redis", "keys"))) is not None:
        shown.append(f"{keys:.0f} keys")
    counts = f"{sum(campaign.counts.values())} done, {campaign.num_wrong} wrong"
    return f"{census.at_s:6.0f} s, at rest after {census.rest_s:4.1f} s: {', '.join(shown)}; {counts}"


def table(outcome: Outcome) -> str:
    lines = [("who", "what", "first", "second third", "last third", "allowed", "rose in", "")]
    for (role, measure), found in outcome.trends().items():
        first = outcome.censuses[0].figures[role, measure]
        numbers = (f"{first:.1f}", f"{found.before:.1f}", f"{found.after:.1f}", f"+{found.allowed:.1f}")
        verdict = "GROWS" if found.grows else ""
        lines.append((role, measure, *numbers, f"{found.share:.0%}", verdict))
    complaints = outcome.complaints()
    wrong = [f"WRONG ({len(complaints)}):", *complaints]
    end = wrong if complaints else ["nothing grew, nothing differed"]
    return "\n".join([columns(lines), "", outcome.campaign.table(), "", *end])


def figures(outcome: Outcome, options: Options) -> dict[str, Any]:
    return {
        "options": {**asdict(options), "session_ttl_s": TTL_S},
        "bounds": {name: asdict(bound) for name, bound in BOUNDS.items()},
        "done": {f"{what}: {result}": count for (what, result), count in outcome.campaign.counts.items()},
        "slowest_s": {what: round(seconds, 2) for what, seconds in outcome.slowest_s.items()},
        "samples_again": outcome.num_again,
        "trends": [
            {"role": role, "measure": measure, **asdict(found), "grows": found.grows}
            for (role, measure), found in outcome.trends().items()
        ],
        "censuses": [
            {
                "at_s": round(census.at_s, 1),
                "rest_s": round(census.rest_s, 1),
                **{f"{role}.{measure}": round(value, 2) for (role, measure), value in census.figures.items()},
            }
            for census in outcome.censuses
        ],
        "complaints": outcome.complaints(),
    }
