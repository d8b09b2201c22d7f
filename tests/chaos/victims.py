"""Targets of strikes: the processes of a cluster by role, and the actions."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import psutil

from orchestrator.storage.session_store import LEASE_S

ROLES = ("draft", "target", "orchestrator", "proxy", "redis")

_TITLES = {
    "draft": "ray::ServeReplica:gammaray-draft:",
    "target": "ray::ServeReplica:gammaray-target:",
    "orchestrator": "ray::ServeReplica:gammaray:",
}
_STARTING = ("initialize", "__init__")


class Action(str, Enum):
    KILL = "kill -9"
    STOP = "SIGSTOP"
    PAUSE = "SIGSTOP for longer than a lease"
    DEMOTE = "demoted"
    FILL = "OOM"
    OCCUPY = "BUSY"
    LOAD = "kill -9, then LOADING"
    SUSPEND = "SIGSTOP until its sessions have ended elsewhere"


EVERYWHERE = (Action.KILL, Action.STOP)
SPECIAL = {
    "redis": (Action.PAUSE, Action.DEMOTE, Action.FILL, Action.OCCUPY, Action.LOAD),
    "orchestrator": (Action.SUSPEND,),
}
"""What is done to processes of one role alone, and never with other blows."""

PAUSE_S = LEASE_S + 2.0


@dataclass(frozen=True)
class Blow:
    """An action on one process."""

    role: str
    action: Action
    stop_s: float
    choice: float  # in [0, 1): selects one of the processes of the role


@dataclass(frozen=True)
class Strike:
    """Simultaneous actions."""

    after_s: float
    blows: tuple[Blow, ...]

    @property
    def label(self) -> str:
        return (
            "several at once"
            if len(self.blows) > 1
            else f"{self.blows[0].role}, {self.blows[0].action.value}"
        )


def plan(
    seed: int, pause_s: tuple[float, float], stop_s: tuple[float, float], roles: Sequence[str] = ROLES
) -> Iterator[Strike]:
    """Yield endless strikes in an order given by the seed only; all roles and actions in turn."""
    rng = random.Random(seed)

    def blow(role: str, action: Action) -> Blow:
        seconds = PAUSE_S if action is Action.PAUSE else rng.uniform(*stop_s)
        return Blow(role, action, seconds, rng.random())

    while True:
        kinds = [[(role, Action.KILL)] for role in roles] * 2 + [[(role, Action.STOP)] for role in roles]
        kinds += [[(role, action)] for role in roles for action in SPECIAL.get(role, ())]
        for count in (size for size in (2, 2, 2, 3, 5) if size <= len(roles)):
            actions = rng.choices((Action.KILL, Action.STOP), weights=(3, 1), k=count)
            kinds.append(list(zip(rng.sample(roles, count), actions, strict=True)))
        rng.shuffle(kinds)
        for kind in kinds:
            yield Strike(rng.uniform(*pause_s), tuple(blow(role, action) for role, action in kind))


def find(role: str, launcher_pid: int, redis_pid: int = 0) -> list[psutil.Process]:
    """Return the serving processes of a role, oldest first."""
    if role == "redis":
        with contextlib.suppress(psutil.NoSuchProcess):
            return [psutil.Process(redis_pid)]
        return []
    found = []
    for process in psutil.Process(launcher_pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and _is(process, role):
                found.append((process.create_time(), process))
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]


def _is(process: psutil.Process, role: str) -> bool:
    if role == "proxy":
        return process.name() == "haproxy"
    title = " ".join(process.cmdline())
    return title.startswith(_TITLES[role]) and not any(word in title for word in _STARTING)


def strike(processes: Sequence[psutil.Process], blow: Blow) -> psutil.Process | None:
    """Apply the action to one of the processes and return it; None if it has ended."""
    if not processes:
        return None
    victim = processes[int(blow.choice * len(processes))]
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.kill() if blow.action is Action.KILL else victim.suspend()  # STOP, PAUSE and SUSPEND
        return victim
    return None
