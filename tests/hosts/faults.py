"""What happens to hosts and links of a cluster, and when all is well again."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from tests.hosts.cluster import HostsCluster

AFTER_S = 4.0
"""Streams go on for so long after a fault."""
BEFORE_S = 2.0


@dataclass(frozen=True)
class Fault:
    """One fault of a host or of its link.

    Attributes:
        strikes: Begins it.
        ends: Ends it.
        lasts_s: Seconds between the two.
        streams: Orchestrators that clients use meanwhile; none of their streams may fail.
        is_quick: Whether it is part of the tests, not only of the table.
    """

    strikes: Callable[[HostsCluster], None]
    ends: Callable[[HostsCluster], None]
    lasts_s: float
    streams: tuple[str, ...] = ("head1", "head2")
    is_quick: bool = True


@dataclass(frozen=True)
class Outcome:
    """What clients saw of a fault: completions and wrong ones, errors, and the longest pause in seconds."""

    completions: int
    wrong: list[str]
    errors: list[str]
    pause_s: float


def _link(name: str, *, hears: bool = False, is_heard: bool = False) -> Callable[[HostsCluster], None]:
    return lambda cluster: cluster.host(name).set_link(hears=hears, is_heard=is_heard)


def _mended(name: str) -> Callable[[HostsCluster], None]:
    return lambda cluster: cluster.host(name).set_link()


def _down(name: str, lasts_s: float, *, is_quick: bool = True) -> Fault:
    return Fault(_link(name), _mended(name), lasts_s, is_quick=is_quick)


def _restart(cluster: HostsCluster) -> None:
    """Restart every worker, host by host, each after the one before serves again."""
    for name, role in (("target1", "target"), ("target2", "target"), ("draft", "draft")):
        cluster.host(name).end(signal.SIGTERM)
        cluster.start_worker(role, name)
        cluster.wait("head1", target=2, draft=1)


FAULTS = {
    "a target's link is down": _down("target1", 5),
    "a target's link is down for a minute": _down("target1", 60, is_quick=False),
    "a target hears nothing": Fault(_link("target1", is_heard=True), _mended("target1"), 5),
    "a target is not heard": Fault(_link("target1", hears=True), _mended("target1"), 5),
    "the drafter's link is down": _down("draft", 5),
    "Redis's link is down": _down("redis", 3),
    "Redis's link is down for 20 s": _down("redis", 20, is_quick=False),
    "workers are restarted host by host": Fault(_restart, lambda _: None, 0),
    "a target's host is gone, and a new one joins": Fault(
        lambda cluster: cluster.host("target2").cut_power(),
        lambda cluster: cluster.start_worker("target", "target3") and None,
        3,
    ),
    "an orchestrator's host is gone": Fault(
        lambda cluster: cluster.host("head2").cut_power(), lambda _: None, 3, streams=("head1",)
    ),
}
"""In this order, as the last two end hosts for good."""


def suffer(cluster: HostsCluster, fault: Fault) -> Outcome:
    """Strike while clients stream, end the fault, and wait until every process that is left serves."""
    with cluster.loaded(BEFORE_S + fault.lasts_s + AFTER_S, *fault.streams) as reports:
        time.sleep(BEFORE_S)
        since = time.monotonic()
        fault.strikes(cluster)
        time.sleep(fault.lasts_s)
        fault.ends(cluster)
    cluster.wait("head1", target=2, draft=1, redis=1)
    arrivals = [times for report in reports for times in report["arrivals"]]
    return Outcome(
        sum(report["completions"] for report in reports),
        [wrong for report in reports for wrong in report["wrong"]],
        [error for report in reports for error in report["errors"]],
        max((b - a for times in arrivals for a, b in pairwise(times) if b > since), default=0.0),
    )
