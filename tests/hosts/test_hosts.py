"""Faults of whole hosts and of their links while clients stream: no token changes, and no stream is lost."""

import subprocess
import sys

import pytest

from tests.hosts.faults import FAULTS, LAST, QUICK

TIMEOUT_S = 1200.0


@pytest.mark.e2e
@pytest.mark.kills
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    ("options", "faults"),
    [
        pytest.param(["--quick"], QUICK, id="quick"),
        pytest.param([], FAULTS, id="all", marks=pytest.mark.nightly),
    ],
)
def test_streams_survive_faults_of_hosts_and_links(options, faults):
    command = [sys.executable, "-m", "tests.hosts", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for fault in (*FAULTS, LAST):
        assert (f"{fault.name}: " in ended.stdout) is (fault in (*faults, LAST)), ended.stdout
