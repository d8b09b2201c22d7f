"""The Serve configuration that the chart renders for a trial on CPUs, deployed on a real Ray."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import helm_python
import pytest
import yaml
from cluster_helpers import STOP_TIMEOUT_S, is_without_model, undisturbed
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gammaray import Client

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "gammaray"
PROMPT = "def read_lines(path):"


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    values = yaml.safe_load((CHART / "examples" / "cpu-trial.yaml").read_text())
    rendered = helm_python.Chart.load(CHART).render(values, name="trial")
    manifest = yaml.safe_load(rendered["gammaray/templates/rayservice.yaml"])
    path = tmp_path_factory.mktemp("chart") / "serve.yaml"
    path.write_text(manifest["spec"]["serveConfigV2"])
    log = path.with_suffix(".log")
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "served_chart.py"), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        words = process.stdout.readline().split()
        assert words[:1] == ["ready"], log.read_text()[-3000:]
        with Client(words[2]) as client:  # orchestrators find the workers some time after both run
            client.wait_ready(60, roles=("target", "draft"))
        yield words[1], words[2]
        process.stdin.close()
        assert process.wait(STOP_TIMEOUT_S) == 0, log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_configuration_of_the_chart_serves_the_targets_own_text(addresses):
    with Client(addresses[1], timeout_s=120) as client:
        plain = client.complete(PROMPT, max_tokens=24, temperature=0, gamma=0)
        drafted = undisturbed(
            lambda: client.complete(PROMPT, max_tokens=24, temperature=0, gamma=4),
            is_without_model,
        )
    assert plain.text == drafted.text
    assert drafted.usage.accepted_prediction_tokens > 0
    assert plain.usage.accepted_prediction_tokens == 0


def test_every_role_is_there_once(addresses):
    with Client(addresses[1]) as client:
        roles = [process.role for process in client.status()]
    assert sorted(role for role in roles if role in ("orchestrator", "draft", "target")) == [
        "draft",
        "orchestrator",
        "target",
    ]


def test_readiness_probe_of_orchestrators_is_answered(addresses):
    with urllib.request.urlopen(f"http://{addresses[0]}/-/healthz", timeout=30) as response:
        assert response.status == 200


def test_readiness_probe_of_workers_is_answered(addresses):
    with Client(addresses[1]) as client:
        workers = [process for process in client.status() if process.role in ("draft", "target")]
    for worker in workers:
        with grpc.insecure_channel(worker.address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
