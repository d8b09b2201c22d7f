"""Settings every test shares: no hub look-ups, one arithmetic thread (the machines have two cores)."""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Seeded like all our randomness, and no limit of time: a loaded machine is no counterexample.
settings.register_profile(
    "gammaray", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gammaray")


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
