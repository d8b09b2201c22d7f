"""Starts of clusters that must fail, and starts that a signal ends."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from orchestrator.launcher.preflight import free_ports
from services.demo_pair import TARGET_DIR
from tests.support.cluster.cluster_helpers import (
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    launch,
    started_with,
    wait_until_gone,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

FAIL_FAST_S = 60.0
ROOT = Path(__file__).parents[2]


def refuse(*options, timeout_s=FAIL_FAST_S, status=2):
    """Run a launcher that must refuse to start; return what it says."""
    ports = [str(port) for port in free_ports("127.0.0.1", 2)]
    defaults = () if "--http-port" in options else ("--http-port", ports[0], "--grpc-port", ports[1])
    mark = uuid.uuid4().hex
    with launch("--wait-ready", *defaults, *options, mark=mark, stderr=subprocess.PIPE) as launcher:
        output, complaint = launcher.communicate(timeout=timeout_s)
    assert launcher.returncode == status
    assert output == ""
    assert len(complaint.splitlines()) == 1, complaint
    assert started_with(mark) == []
    return complaint


def raylet_and_guardian(process):
    """Return everything below a launcher and its guardian's directory once it has started a raylet."""
    commands = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            commands.append((child, child.cmdline()))
    directories = [Path(command[-1]) for _, command in commands if "orchestrator.launcher.reaper" in command]
    if directories and any("raylet" in " ".join(command[:1]) for _, command in commands):
        return [child for child, _ in commands], directories[0]
    return None


def test_port_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert str(port) in refuse("--http-port", str(port))


def test_architecture_that_is_not_supported_is_refused_with_the_reason(tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(TARGET_DIR, folder)
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "vocab_size": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    complaint = refuse("--target", str(folder), "--draft", "demo", timeout_s=180, status=1)
    assert "cannot be served" in complaint


def test_setting_that_a_worker_refuses_ends_the_start_with_its_words():
    complaint = refuse("--engine", "native", "--dtype", "bfloat16", timeout_s=180)
    assert complaint.startswith("gammaray: engine: got native, allowed: auto or transformers for ")
    assert complaint.endswith(": bfloat16 is not covered\n")


BENCHMARK = """
import asyncio
from benchmarks.cluster import run_or_exit, running_cluster

async def work():
    async with running_cluster("--draft-workers", "0"):
        await asyncio.Event().wait()

run_or_exit(work())
"""


def start_launcher():
    ports = [str(port) for port in free_ports("127.0.0.1", 2)]
    options = ("--wait-ready", "--http-port", ports[0], "--grpc-port", ports[1])
    return launch(*options, stderr=subprocess.PIPE)


def start_benchmark():
    """Start a program that starts `gammaray up` as benchmarks do: in a session of its own."""
    command = [sys.executable, "-c", BENCHMARK]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("start", "status"),
    [pytest.param(start_launcher, 0, id="launcher"), pytest.param(start_benchmark, 143, id="benchmark")],
)
def test_sigterm_during_startup_leaves_no_process_and_prints_nothing(start, status):
    with start() as starter:
        process, deadline = psutil.Process(starter.pid), time.monotonic() + START_TIMEOUT_S
        while (found := raylet_and_guardian(process)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        below, directory = found
        assert directory.exists()
        starter.send_signal(signal.SIGTERM)
        output = starter.communicate(timeout=STOP_TIMEOUT_S)
        assert (starter.returncode, *output) == (status, "", "")
        assert wait_until_gone(below, 1) == []
    assert not directory.exists()
