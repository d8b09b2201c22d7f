"""Faults of whole hosts and of their links while clients stream: no token changes, and no stream is lost."""

import subprocess
import sys

import pytest

from tests.hosts.faults import FAULTS, LAST, QUICK_S

TIMEOUT_S = 1200.0


@pytest.mark.e2e
@pytest.mark.kills
@pytest.mark.timeout(TIMEOUT_S)
def test_streams_survive_faults_of_hosts_and_links():
    command = [sys.executable, "-m", "tests.hosts", "--quick"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for fault in (*FAULTS, LAST):
        assert (f"{fault.name}: " in ended.stdout) is (fault.seconds < QUICK_S), ended.stdout
