"""The commands of the documentation that need a running cluster, against one."""

import json
import re
import subprocess

import pytest

from tests.support.docs_commands import ON_A_CLUSTER, commands, environment

pytestmark = pytest.mark.e2e

CASES = [(page, command) for page, command in commands() if re.match(ON_A_CLUSTER, command)]
SESSION = "documented"


def here(command, cluster):
    """Return a command with this cluster's addresses and names in place of the page's."""
    command = command.replace("localhost:8000", cluster.http.removeprefix("http://"))
    if command.startswith("gammaray"):
        command = re.sub(r" --address \S+", "", command)
        command = command.replace("gammaray trace SESSION", f"gammaray trace {SESSION}")
    return command


@pytest.fixture(scope="module")
def session(cluster):
    """A session that has ended, for commands that look at one."""
    options = {"gammaray": {"session_id": SESSION}}
    cluster.openai().completions.create(model="", prompt="def f(", max_tokens=8, extra_body=options)


@pytest.mark.parametrize(("page", "command"), CASES, ids=[f"{p}: {c[:60]}" for p, c in CASES])
def test_command_runs_against_a_cluster(page, command, cluster, session):
    env = {**environment(), "GAMMARAY_ADDRESS": cluster.grpc, "GAMMARAY_URL": cluster.http}
    shell = ["bash", "-euo", "pipefail", "-c", here(command, cluster)]
    said = "def add(a, b):\n"  # for the chat, which ends with its input
    ended = subprocess.run(shell, env=env, input=said, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    if command.startswith("curl"):
        assert json.loads(ended.stdout)["choices"]
    else:
        assert ended.stdout.strip()
