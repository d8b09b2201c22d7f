"""What every test shares: no hub look-ups, one arithmetic thread (the machines have two cores), and skips.

A test that needs a program outside Python is marked `needs`. `tests/support/threads_left.py` finds threads
that outlive their test.
"""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.programs import PROGRAMS
from tests.support import threads_left

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A CI runner or a shell's `&` ignores SIGINT, which programs inherit and which tests of Ctrl-C send to them.
# With a handler it is ignored here as before, and programs that are started get the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda *_: None)

# Seeded like all our randomness, and no limit of time: a loaded machine is no counterexample.
settings.register_profile(
    "gammaray", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gammaray")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(threads_left)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without the garbage collector: it may break the parser that rewrites their asserts.

    Before Python 3.11.8 and 3.12.2 a finalizer that parses, too, such as one that prints a traceback, leaves
    the parser that it interrupted with "AST constructor recursion depth mismatch" (python/cpython#106905).
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest, those of a cluster, and skip the tests whose programs are missing."""
    items.sort(key=lambda item: item.path.name != "test_smoke.py")
    for item in items:
        for marker in item.iter_markers("needs"):
            for program in (PROGRAMS[name] for name in marker.args):
                if program.path is None:
                    item.add_marker(pytest.mark.skip(reason=program.missing))
