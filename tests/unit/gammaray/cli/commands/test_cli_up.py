"""`gammaray up` becomes `python -m orchestrator.launcher.cluster`; a stand-in prints its arguments."""

import json
import os
import signal
import subprocess
import sys

import pytest

from gammaray.cli.commands import up
from gammaray.config import ClusterSettings, PoolSize
from orchestrator.launcher.cluster import parse_options
from tests.support.own_process import ROOT

WAIT_S = 120.0

STAND_IN = """
import json, os, signal, sys, time
def leave(number, frame):
    os.write(1, f"signal {number}\\n".encode())  # print may be running: it cannot be entered twice
    sys.exit(7)
signal.signal(signal.SIGINT, leave)
signal.signal(signal.SIGTERM, leave)
print(json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:]}), flush=True)
if "wait" in sys.argv:
    time.sleep(200)
sys.exit(5)
"""


@pytest.fixture
def launch(tmp_path):
    """Start `gammaray up` where `orchestrator.launcher.cluster` is the stand-in."""
    package = tmp_path / "orchestrator" / "launcher"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "cluster.py").write_text(STAND_IN)
    started = []

    def launch(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "gammaray", "up", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        process.kill()
        process.communicate()


def arguments_of(process):
    return json.loads(process.communicate(timeout=WAIT_S)[0])["arguments"]


GIVEN = (
    *("--target", "a b", "--draft-workers", "2", "--http-port=8123", "--deterministic"),
    *("--redis-url", "redis://127.0.0.1:1/0", "--wait-ready", "--start-timeout-s", "9.5"),
)


def test_up_passes_the_options_that_were_given_and_the_exit_code(launch):
    process, without = launch(*GIVEN), launch()
    assert arguments_of(process) == [*GIVEN]
    assert process.returncode == 5
    assert arguments_of(without) == [], "so that the environment counts"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_up_signals_reach_the_launcher_whose_exit_code_counts(launch, number):
    process = launch("--target", "wait")
    first = json.loads(process.stdout.readline())
    assert first["pid"] == process.pid
    process.send_signal(number)
    stdout, _ = process.communicate(timeout=WAIT_S)
    assert stdout == f"signal {number.value}\n"
    assert process.returncode == 7


def test_up_options_are_those_that_the_launcher_knows(monkeypatch):
    cluster, options = parse_options(GIVEN)
    assert (cluster.target, cluster.draft_workers, cluster.http_port) == ("a b", PoolSize(2), 8123)
    assert cluster.deterministic
    assert options == {"wait_ready": True, "die_with_parent": False, "start_timeout_s": 9.5}
    monkeypatch.setattr("sys.argv", ["cluster"])
    assert parse_options()[1]["start_timeout_s"] == 300
    for option in up.up.params:
        for name in (*option.opts, *option.secondary_opts):
            field = ClusterSettings.model_fields.get(option.name)
            value = () if option.is_flag else (str(field.default if field else 5),)
            parse_options([name, *value])
