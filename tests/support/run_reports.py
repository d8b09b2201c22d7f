"""What a run of tests prints at its end: skipped tests, tests left out by -m, unmarked tests that are slow.

A plugin of pytest, which `tests/conftest.py` registers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

SLOW_S = 2.0
"""A test that takes longer should be faster or marked `slow`."""

TIERS = ("slow", "e2e")
"""Markers of what `make test` leaves out."""

_LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT_OUT] = {}


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count the tests of each tier that -m left out."""
    tiers = (next((name for name in TIERS if item.get_closest_marker(name)), None) for item in items)
    items[0].config.stash[_LEFT_OUT] = dict(Counter(tier for tier in tiers if tier))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts of a process of xdist, which all collect the same, to the one that prints."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = session.config.stash[_LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of a process of xdist; one that crashed has none."""
    left_out = getattr(node, "workeroutput", {}).get("left_out")
    if left_out:
        node.config.stash[_LEFT_OUT] = left_out


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the reports."""
    _print_skipped(terminalreporter)
    _print_slow(terminalreporter)
    left_out = config.stash[_LEFT_OUT]
    if left_out.get("slow"):
        terminalreporter.section("left out")
        counts = " and ".join(f"{count} tests marked {name}" for name, count in left_out.items())
        terminalreporter.line(f"{counts}; to run them, too: make test-all")


def _print_skipped(terminal: pytest.TerminalReporter) -> None:
    """Print what was skipped and how to enable it."""
    skipped: dict[str, list[str]] = {}
    for report in terminal.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped.setdefault(reason.removeprefix("Skipped: "), []).append(report.nodeid)
    if not skipped:
        return
    terminal.section("skipped tests, and how to enable them")
    for reason, tests in sorted(skipped.items(), key=lambda entry: -len(entry[1])):
        cause, _, command = reason.partition("; to enable: ")
        terminal.line(f"{len(tests)} skipped: {cause}")
        for file in dict.fromkeys(test.partition("::")[0] for test in tests):
            terminal.line(f"    {file}")
        if command:
            terminal.line(f"    to enable: {command}")


def _print_slow(terminal: pytest.TerminalReporter) -> None:
    """Print the unmarked tests that took long, fixtures that they were the first to need included."""
    took: Counter[str] = Counter()
    for reports in terminal.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and not report.keywords.keys() & set(TIERS):
                took[report.nodeid] += report.duration
    slow = [(seconds, test) for test, seconds in took.most_common() if seconds > SLOW_S]
    if slow:
        terminal.section(f"unmarked tests that took over {SLOW_S:g} s: make them faster, or mark them slow")
        for seconds, test in slow:
            terminal.line(f"{seconds:6.1f} s {test}")
