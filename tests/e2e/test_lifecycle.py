"""Starts of clusters that must fail, and starts that a signal ends."""

import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from orchestrator.launcher.preflight import free_ports
from tests.support.cluster.cluster_helpers import (
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Cluster,
    launch,
    started_with,
    wait_until_gone,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

REFUSE_S = 180.0


def begun(*options, mark=""):
    http_port, grpc_port = map(str, free_ports("127.0.0.1", 2))
    given = ("--wait-ready", "--http-port", http_port, "--grpc-port", grpc_port, *options)
    return launch(*given, mark=mark, stderr=subprocess.PIPE)


def refuse(*options):
    """Run a launcher that must refuse to start; return what it says."""
    with begun(*options, mark=(mark := uuid.uuid4().hex)) as launcher:
        output, complaint = launcher.communicate(timeout=REFUSE_S)
    assert launcher.returncode == 2
    assert output == ""
    assert len(complaint.splitlines()) == 1, complaint
    assert started_with(mark) == []
    return complaint


def raylet_and_guardian(launcher):
    """Return everything below a launcher and its guardian's directory once it has started a raylet."""
    commands = Cluster("", "", launcher).commands()
    directories = [Path(command[-1]) for _, command in commands if "orchestrator.launcher.reaper" in command]
    if directories and any("raylet" in command[0] for _, command in commands):
        return [child for child, _ in commands], directories[0]
    return None


@pytest.mark.nightly
def test_setting_that_a_worker_refuses_ends_the_start_with_its_words():
    complaint = refuse("--engine", "native", "--dtype", "float16")
    assert complaint.startswith("gammaray: engine: got native, allowed: auto or transformers for ")
    assert complaint.endswith(": float16 is not covered\n")


def test_sigterm_during_startup_leaves_no_process_and_prints_nothing():
    with begun() as starter:
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := raylet_and_guardian(starter)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        below, directory = found
        assert directory.exists()
        starter.send_signal(signal.SIGTERM)
        output = starter.communicate(timeout=STOP_TIMEOUT_S)
        assert (starter.returncode, *output) == (0, "", "")
        assert wait_until_gone(below, 1) == []
    assert not directory.exists()
