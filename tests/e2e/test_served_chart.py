"""The Serve configuration that the chart renders for a trial on CPUs, deployed on a real Ray."""

import asyncio
import subprocess
import sys
import urllib.request
import warnings

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gammaray import Client, DeadlineExceededError
from gammaray.deploy.serve_config import SCALE_DOWN_DELAY_S
from tests.chaos.chaos_drafters import Way
from tests.chaos.clients import Clients
from tests.chaos.load import Ask, reference, streams
from tests.support.chart.chart_helpers import VARIANTS, container, merged, passing_pods, serve_config
from tests.support.cluster.cluster_helpers import (
    START_TIMEOUT_S,
    eventually,
    is_without_model,
    program,
    undisturbed,
)

pytestmark = [pytest.mark.e2e, pytest.mark.kills, pytest.mark.nightly, pytest.mark.timeout(600)]

PROMPT = "def read_lines(path):"
SCALING = {"orchestrator": {"replicas": "1:2"}, "scaling": {"orchestrator_load": 2}}
TRIAL = merged(VARIANTS["cpu-trial"], SCALING)
"""Values of a trial on CPUs whose orchestrators scale."""


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    path = tmp_path_factory.mktemp("chart") / "serve.yaml"
    path.write_text(yaml.safe_dump(serve_config(TRIAL)))
    log = path.with_suffix(".log")
    with log.open("w") as errors, program("served_chart", str(path), stderr=errors) as served:
        words = served.answer(START_TIMEOUT_S).split()
        assert words[:1] == ["ready"], log.read_text()[-3000:]
        with Client(words[2]) as client:  # orchestrators find the workers some time after both run
            client.wait_ready(60, roles=("target", "draft"))
        yield words[1], words[2]


def test_configuration_of_the_chart_serves_the_targets_own_text(addresses):
    with Client(addresses[1], timeout_s=120) as client:
        options = {"max_tokens": 24, "temperature": 0}
        plain = client.complete(PROMPT, **options, gamma=0)
        drafted = undisturbed(lambda: client.complete(PROMPT, **options, gamma=4), is_without_model)
    assert plain.text == drafted.text
    assert drafted.summary.accepted_tokens > 0
    assert plain.summary.drafted_tokens == 0


def test_every_role_runs_once_and_answers_its_readiness_probe(addresses):
    with Client(addresses[1]) as client:
        found = [one for one in client.status() if one.role in ("orchestrator", "draft", "target")]
    processes = {process.role: process for process in found}
    assert len(processes) == len(found) == 3
    with urllib.request.urlopen(f"http://{addresses[0]}/-/healthz", timeout=30) as response:
        assert response.status == 200
    for role in ("draft", "target"):
        with grpc.insecure_channel(processes[role].address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_helm_test_passes(addresses):
    command = container(passing_pods(TRIAL)["test"])["command"]
    command = [f"http://{addresses[0]}" if one.startswith("http://") else one for one in command]
    ended = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert "/v1/completions: '" in ended.stdout


async def test_orchestrators_follow_their_requests(addresses):
    """Two for a while, one again; every stream has the tokens of plain decoding."""

    def num_orchestrators() -> int:
        with Client(addresses[1]) as client:
            try:
                processes = client.status(timeout_s=30)
            except DeadlineExceededError:
                # Serve's proxy may hand a call to a replica that it stops; a second one must be answered.
                warnings.warn("GetStatus was not answered within 30 s", stacklevel=1)
                processes = client.status(timeout_s=30)
            return sum(process.role == "orchestrator" for process in processes)

    async def become(count: int, timeout_s: float) -> bool:
        return await asyncio.to_thread(eventually, lambda: num_orchestrators() == count, timeout_s)

    assert num_orchestrators() == 1
    wanted = [Ask(PROMPT, 1.0, seed, max_tokens=200) for seed in range(6)]
    expected, way = await reference(addresses[1], wanted), Way("adaptive", (), {})
    clients = Clients(addresses[1], "", streams(wanted, [way]), expected, 200, num_http=0, may_fail=False)
    async with clients.streaming():
        assert await become(2, 120)
    assert await become(1, 120 + SCALE_DOWN_DELAY_S)
