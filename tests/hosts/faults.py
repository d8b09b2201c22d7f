"""What happens to hosts and links of a cluster; each ends once every process that is left serves again."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from tests.chaos.stage import Trouble
from tests.hosts.cluster import HostsCluster


@contextmanager
def _cut(cluster: HostsCluster, name: str, *, hears: bool = False, is_heard: bool = False) -> Iterator[None]:
    cluster.host(name).set_link(hears=hears, is_heard=is_heard)
    yield
    cluster.host(name).set_link()
    cluster.wait(target=2, draft=1, redis=1)


@contextmanager
def _restarted(cluster: HostsCluster) -> Iterator[None]:
    """Restart every worker, host by host, each after the one before serves again."""
    for name, role in (("target1", "target"), ("target2", "target"), ("draft", "draft")):
        cluster.host(name).end(signal.SIGTERM)
        cluster.start_worker(role, name)
        cluster.wait(target=2, draft=1)
    yield


@contextmanager
def _gone(cluster: HostsCluster, name: str, successor: str = "") -> Iterator[None]:
    cluster.host(name).cut_power()
    yield
    if successor:
        cluster.start_worker("target", successor)
    cluster.wait(target=2, draft=1, redis=1)


def _down(title: str, name: str, lasts_s: float, **link: bool) -> Trouble:
    return Trouble(title, lasts_s, partial(_cut, name=name, **link))


QUICK = (
    _down("a target's link is down", "target1", 5),
    _down("a target hears nothing", "target1", 5, is_heard=True),
    _down("the drafter's link is down", "draft", 5),
    _down("Redis's link is down", "redis", 3),
    Trouble(
        "a target's host is gone, and a new one joins", 3, partial(_gone, name="target2", successor="target3")
    ),
)
FAULTS = (
    _down("a target's link is down for a minute", "target1", 60),
    _down("a target is not heard", "target1", 5, hears=True),
    _down("Redis's link is down for 20 s", "redis", 20),
    Trouble("workers are restarted host by host", 0, _restarted),
    *QUICK,
)
LAST = Trouble("an orchestrator's host is gone", 3, partial(_gone, name="head2"))
"""Clients stream from the other one."""
