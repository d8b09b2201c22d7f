"""A check after each test: threads that it started have ended.

A thread that goes on disturbs any later test. A plugin of pytest, which `tests/conftest.py` registers.

While a fixture of a module or a session is set up, tests may start threads that belong to it, such as those
of a server: then threads are checked when the last such fixture is gone.
"""

import threading
import time
from collections.abc import Iterator

import pytest

DEADLINE_S = 10.0
"""For threads to end, on a machine that is busy."""

OF_THE_PROCESS = (
    *("gammaray-cpu", "gammaray-parser", "gammaray-compiler", "gammaray-client"),
    *("tqdm_monitor", "pytest_timeout", "execnet"),
)
"""Beginnings of names of threads that are started once and serve every later test."""

OF_GRPC = "_poll_wrapper"
"""Function of the thread that polls for all asynchronous channels of a process."""

_LEFT = pytest.StashKey[dict[threading.Thread, str]]()
_WIDE = pytest.StashKey[set[object]]()
_KNOWN = pytest.StashKey[set[threading.Thread]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT], config.stash[_WIDE], config.stash[_KNOWN] = {}, set(), set()


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    """Note a fixture of ours that outlives its first test; pytest's own start no threads."""
    if fixturedef.scope != "function" and fixturedef.baseid:
        request.config.stash[_WIDE].add(fixturedef)


def pytest_fixture_post_finalizer(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> None:
    request.config.stash[_WIDE].discard(fixturedef)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.config.stash[_KNOWN].update(threading.enumerate())
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Compare threads with those before the test; fail if some go on."""
    yield
    known, left, wide = (item.config.stash[key] for key in (_KNOWN, _LEFT, _WIDE))
    for thread in threading.enumerate():
        # Python cannot tell when a "Dummy" thread ends: it is of a library that once called Python in it.
        is_shared = thread.name.startswith((*OF_THE_PROCESS, "Dummy-")) or OF_GRPC in thread.name
        if thread not in known and not is_shared:
            left[thread] = item.nodeid
    if left and not wide:
        deadline = time.monotonic() + DEADLINE_S
        while (going_on := [thread for thread in left if thread.is_alive()]) and time.monotonic() < deadline:
            time.sleep(0.01)
        complaints = [f"{thread.name}, begun in {left[thread]}" for thread in going_on]
        left.clear()
        assert not complaints, f"threads that outlive their tests: {'; '.join(complaints)}"
