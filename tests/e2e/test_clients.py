"""SDK and command line against a whole cluster."""

import pytest
from click.testing import CliRunner

from gammaray import Client
from gammaray.cli import main
from tests.support.cluster.cluster_helpers import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

PROMPT = "def read_lines(path):\n"


def gammaray(*arguments):
    return CliRunner().invoke(main, arguments, env={"NO_COLOR": "1"})


def test_status_lists_every_process(cluster):
    def is_true():
        """Whether a status is complete and equals the processes of the machine just before and after it.

        A status may differ: a process may be replaced meanwhile (HAProxy is, by each new configuration), and
        one that does not respond within a second is reported as not healthy.
        """
        before = {process.pid for process in cluster.processes()}
        processes = cluster.status()
        running = before & {process.pid for process in cluster.processes()}
        seen[:] = processes
        return all(process.healthy and process.pid in running for process in processes)

    seen = []
    assert eventually(is_true), seen
    assert {process.role for process in seen} == {"orchestrator", "draft", "target", "redis", "proxy"}
    assert all(process.model == "demo" for process in seen if process.role in ("draft", "target"))
    assert cluster.http.removeprefix("http://") in {process.address for process in seen}


def test_cli_generate_streams_text_and_sums_up(cluster):
    options = ["--max-tokens", "16", "--seed", "4", "--temperature", "0.7"]
    done = gammaray("generate", PROMPT, "--address", cluster.grpc, *options)
    assert done.exit_code == 0, done.stderr
    with Client(cluster.grpc) as client:
        text = client.complete(PROMPT, max_tokens=16, seed=4, temperature=0.7).text
    assert text.strip() in done.stdout
    assert "alpha" in done.stderr
