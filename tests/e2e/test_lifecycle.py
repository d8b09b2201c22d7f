"""Starts of clusters that must fail, and starts that a signal ends."""

import contextlib
import json
import shutil
import signal
import subprocess
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


def refuse(*options, timeout_s=FAIL_FAST_S, status=2):
    """Run a launcher that must refuse to start; return what it says."""
    ports = [str(port) for port in free_ports("127.0.0.1", 2)]
    mark = uuid.uuid4().hex
    given = ("--wait-ready", "--http-port", ports[0], "--grpc-port", ports[1], *options)
    with launch(*given, mark=mark, stderr=subprocess.PIPE) as launcher:
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


@pytest.mark.nightly
def test_architecture_that_is_not_supported_is_refused_with_the_reason(tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(TARGET_DIR, folder)
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "vocab_size": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    complaint = refuse("--target", str(folder), "--draft", "demo", timeout_s=180, status=1)
    assert "cannot be served" in complaint


@pytest.mark.nightly
def test_setting_that_a_worker_refuses_ends_the_start_with_its_words():
    complaint = refuse("--engine", "native", "--dtype", "bfloat16", timeout_s=180)
    assert complaint.startswith("gammaray: engine: got native, allowed: auto or transformers for ")
    assert complaint.endswith(": bfloat16 is not covered\n")


def test_sigterm_during_startup_leaves_no_process_and_prints_nothing():
    ports = [str(port) for port in free_ports("127.0.0.1", 2)]
    options = ("--wait-ready", "--http-port", ports[0], "--grpc-port", ports[1])
    with launch(*options, stderr=subprocess.PIPE) as starter:
        process, deadline = psutil.Process(starter.pid), time.monotonic() + START_TIMEOUT_S
        while (found := raylet_and_guardian(process)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        below, directory = found
        assert directory.exists()
        starter.send_signal(signal.SIGTERM)
        output = starter.communicate(timeout=STOP_TIMEOUT_S)
        assert (starter.returncode, *output) == (0, "", "")
        assert wait_until_gone(below, 1) == []
    assert not directory.exists()
