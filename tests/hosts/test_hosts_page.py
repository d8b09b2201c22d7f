"""docs/hosts.md to the letter: each line of its block on the host that it names."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.cluster import START_S
from tests.hosts.network import Network
from tests.support.docs_commands import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.kills, pytest.mark.needs("redis-server"), pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "hosts.md"


def test_commands_of_the_page_lead_to_a_completion(tmp_path):
    lines = re.findall(r"^(\w+)\$ (.+)$", PAGE.read_text(), re.MULTILINE)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GAMMARAY_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environments = {name: {**kept, "PATH": path} for name, _ in lines}
    with Network.made(tmp_path) as network:
        for name in environments:
            host = network.add(name)
            assert f"{name}, {host.address}" in PAGE.read_text()
        for name, line in lines:
            words = shlex.split(line)
            if words[0] == "export":
                variable, value = words[1].split("=", 1)
                environments[name][variable] = value
            elif name == "client":
                answered(network, words, environments[name])
            else:
                network.hosts[name].start("command", words, environments[name], cwd=tmp_path)
        status = answered(network, ["gammaray", "status", "--address=10.77.0.5:9000"], environments["client"])
    roles = [row.split()[0] for row in status.splitlines()[1:]]
    assert sorted(roles) == ["draft", "orchestrator", "redis", "target"]
    assert " no " not in status


def answered(network, words, environment):
    """Return what a command of the client prints, once it succeeds: the others may be starting."""
    ends = time.monotonic() + START_S
    while True:
        process = network.hosts["client"].start("command", words, environment, stdout=subprocess.PIPE)
        output, _ = process.communicate(timeout=START_S)
        if process.returncode == 0:
            return output
        logs = (log for host in network.hosts.values() for log in host.logs)
        assert time.monotonic() < ends, [log.read_text() for log in logs]
        time.sleep(1)
