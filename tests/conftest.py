"""What every test shares: no hub look-ups, one arithmetic thread (the machines have two cores), and skips.

A test that needs a program outside Python is marked `needs`. At the end of a run the tests that were skipped
are listed by reason, each with the command that enables them.
"""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.programs import PROGRAMS

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests whose programs are missing."""
    for item in items:
        for marker in item.iter_markers("needs"):
            for program in (PROGRAMS[name] for name in marker.args):
                if program.path is None:
                    item.add_marker(pytest.mark.skip(reason=program.missing))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was skipped and how to enable it."""
    skipped: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped.setdefault(reason.removeprefix("Skipped: "), []).append(report.nodeid)
    if not skipped:
        return
    terminalreporter.section("skipped tests, and how to enable them")
    for reason, tests in sorted(skipped.items(), key=lambda entry: -len(entry[1])):
        cause, _, command = reason.partition("; to enable: ")
        terminalreporter.line(f"{len(tests)} skipped: {cause}")
        for file in dict.fromkeys(test.partition("::")[0] for test in tests):
            terminalreporter.line(f"    {file}")
        if command:
            terminalreporter.line(f"    to enable: {command}")
