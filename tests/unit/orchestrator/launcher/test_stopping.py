"""Signals that stop the launcher: delivered once, never lost, and not taken from other handlers."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
from orchestrator.launcher.signals import Stop, StopSignals
signals = StopSignals()
signals.take()
"""


def run(body):
    """Run a script that has taken the signals, in a process of its own."""
    return subprocess.run([sys.executable, "-c", SCRIPT + body], capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signal_stops_once_and_nothing_is_printed_afterwards(name):
    done = run(f"""
try:
    os.kill(os.getpid(), signal.{name})
except Stop:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    print("noise")
    print("noise", file=sys.stderr)
    os.system("echo noise; echo noise >&2")
    sys.exit(7 if signals.came else 8)
""")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


STOPPED = {
    "a stop that a library swallows is raised by the next check": """
try:
    os.kill(os.getpid(), signal.SIGTERM)
except BaseException:
    pass
try:
    signals.check()
except Stop:
    sys.exit(7)
""",
    "handlers are kept while a library sets its own": """
with signals.kept():
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(9))
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
os.kill(os.getpid(), signal.SIGUSR1)
try:
    os.kill(os.getpid(), signal.SIGTERM)
except Stop:
    sys.exit(7)
""",
    "a held signal is delivered afterwards": """
try:
    with signals.held():
        os.kill(os.getpid(), signal.SIGTERM)
        assert not signals.came
        held = True
except Stop:
    sys.exit(7 if held else 8)
""",
}


@pytest.mark.parametrize("body", STOPPED.values(), ids=STOPPED)
def test_signal_is_never_lost(body):
    assert run(body).returncode == 7
