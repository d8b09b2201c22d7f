"""Kills and stops of a cluster's processes, and error replies of Redis, in an order that a seed decides."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import psutil

from orchestrator.launcher.redis_server import RedisServer
from orchestrator.storage.session_store import LEASE_S
from tests.chaos.redis_replies import REPLIES, replying
from tests.chaos.stage import ROLES, Done, Stage, Trouble

REPLICATED = ("draft", "target", "orchestrator")
"""Roles with two processes: kills of the only one that is left have a row of their own."""

STOP_S = (0.5, 4.0)
PAUSE_S = LEASE_S + 2.0


@dataclass(frozen=True)
class Blow:
    role: str  # of the process
    kills: bool = True  # SIGKILL; else SIGSTOP, and SIGCONT at the end
    choice: float = 0.0  # in [0, 1): selects one of the processes of the role


def strike(*blows: Blow, seconds: float = 0.0, name: str = "") -> Trouble:
    """Return blows at the same time; processes that are stopped continue after some seconds."""
    (first, *others) = blows
    of_one = f"{first.role}, {'kill -9' if first.kills else 'SIGSTOP'}"
    return Trouble(name or ("several at once" if others else of_one), seconds, partial(_struck, blows=blows))


def strikes(seed: int, roles: Sequence[str] = ROLES) -> Iterator[Trouble]:
    """Yield endless strikes in an order given by the seed only: all roles in turn, alone and together."""
    rng = random.Random(seed)
    while True:
        kinds = [[(role, kills)] for role in roles for kills in (True, True, False)]
        for count in (size for size in (2, 2, 2, 3, 5) if size <= len(roles)):
            actions = rng.choices((True, False), weights=(3, 1), k=count)
            kinds.append(list(zip(rng.sample(roles, count), actions, strict=True)))
        found = []
        for kind in kinds:
            blows = [Blow(*one, rng.random()) for one in kind]
            is_short = all(kills for _, kills in kind)
            found.append(strike(*blows, seconds=0.0 if is_short else rng.uniform(*STOP_S)))
        if "redis" in roles:
            long = strike(Blow("redis", kills=False), seconds=PAUSE_S, name="redis, SIGSTOP past a lease")
            found += [long, *(refusal(code, rng.uniform(*STOP_S)) for code in REPLIES)]
        yield from rng.sample(found, len(found))


def refusal(code: str, seconds: float) -> Trouble:
    """Return some seconds of an error reply of Redis; LOADING lasts as long as it takes."""
    return Trouble(f"redis, {code}", 0.0 if code == "LOADING" else seconds, partial(_refused, code=code))


@contextmanager
def _struck(stage: Stage, blows: Sequence[Blow]) -> Iterator[Done]:
    killed, stopped, more = list[str](), list[psutil.Process](), ""
    for blow, processes in [(blow, stage.find(blow.role)) for blow in blows]:
        if not processes:
            continue
        victim = processes[int(blow.choice * len(processes))]
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill() if blow.kills else victim.suspend()
            killed += [blow.role] * blow.kills
            stopped += [victim] * (not blow.kills)
            if len(processes) == len(blows) == 1 and blow.role in REPLICATED:
                more = ", the only one"
    try:
        yield Done(tuple(killed), more)
    finally:
        for victim in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may have been killed meanwhile
                victim.resume()


@contextmanager
def _refused(stage: Stage, code: str) -> Iterator[Done]:
    assert isinstance(stage.redis, RedisServer)
    with replying(stage.redis, code):
        yield Done(("redis",) if code == "LOADING" else ())
