"""docs/hosts.md to the letter: each line of its block on the host that it names."""

import re
import shlex
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.hosts.cluster import START_S
from tests.hosts.network import Network
from tests.support.docs_commands import ROOT, environment

pytestmark = [pytest.mark.e2e, pytest.mark.kills, pytest.mark.needs("redis-server"), pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "hosts.md"
PLAIN, RAY = PAGE.read_text().split("## Over Ray")
STATUS = ["gammaray", "status", "--address=10.77.0.5:9000"]
GENERATE = ["gammaray", "generate", "--address=10.77.0.5:9000", "--temperature=0", "def add(a, b):"]
NODE_IS_GONE_S = 75.0
"""Ray ends a node that has not been heard for a minute."""


def lines_of(text):
    return re.findall(r"^(\w+)\$ (.+)$", text, re.MULTILINE)


@pytest.fixture
def hosts(tmp_path):
    with Network.made(tmp_path) as network:
        for name, _ in lines_of(PLAIN):
            if name not in network.hosts:
                host = network.add(name)
                assert f"{name}, {host.address}" in PLAIN
        yield network


@pytest.fixture
def folder():
    """A folder with a short name: paths of sockets are short."""
    with TemporaryDirectory(prefix="ray") as name:
        yield Path(name)


def test_commands_of_the_page_lead_to_a_completion(hosts, tmp_path):
    environments = {name: environment() for name in hosts.hosts}
    for name, line in lines_of(PLAIN):
        words = shlex.split(line)
        if words[0] == "export":
            variable, value = words[1].split("=", 1)
            environments[name][variable] = value
        elif name == "client":
            answered(hosts, words)
        else:
            hosts.hosts[name].start("command", words, environments[name], cwd=tmp_path)
    assert_complete(answered(hosts, STATUS))


@pytest.mark.nightly
def test_a_node_of_ray_that_was_cut_off_joins_again(hosts, folder):
    redis = next(shlex.split(line) for name, line in lines_of(PLAIN) if name == "redis")
    hosts.hosts["redis"].start("redis", redis, environment(), cwd=hosts.hosts["redis"].folder)
    for host in ("head", "target", "draft"):
        script = "\n".join(line for name, line in lines_of(RAY) if name == host)
        own = {**environment(), "RAY_TMPDIR": str(folder / host)}
        hosts.hosts[host].start("ray", ["bash", "-c", script], own, cwd=ROOT)
    said = answered(hosts, GENERATE)
    assert_complete(answered(hosts, STATUS))
    hosts.hosts["target"].set_link(hears=False, is_heard=False)
    time.sleep(NODE_IS_GONE_S)
    hosts.hosts["target"].set_link()
    assert answered(hosts, GENERATE).splitlines()[:2] == said.splitlines()[:2]
    assert_complete(answered(hosts, STATUS))


def assert_complete(status):
    roles = [row.split()[0] for row in status.splitlines()[1:]]
    assert sorted(roles) == ["draft", "orchestrator", "redis", "target"]
    assert " no " not in status


def answered(network, words):
    """Return what a command of the client prints, once it succeeds: the others may be starting."""
    ends = time.monotonic() + START_S
    while True:
        process = network.hosts["client"].start("command", words, environment(), stdout=subprocess.PIPE)
        output, _ = process.communicate(timeout=START_S)
        if process.returncode == 0:
            return output
        logs = (log for host in network.hosts.values() for log in host.logs)
        assert time.monotonic() < ends, [log.read_text() for log in logs]
        time.sleep(1)
