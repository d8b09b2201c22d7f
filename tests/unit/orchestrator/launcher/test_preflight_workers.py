"""Settings that workers would reject after the start of a cluster are rejected before it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gammaray
from gammaray.config import ClusterSettings
from gammaray.deploy.gpus import CudaDevices
from gammaray.deploy.serve_config import role_settings, serve_document
from gammaray.errors import InvalidArgumentError
from orchestrator.launcher.preflight import check_port, check_workers

ROOT = Path(gammaray.__file__).parents[1]
NONE = CudaDevices(0, "there is no NVIDIA driver")


def test_defaults_pass_with_and_without_gpus():
    assert check_workers(ClusterSettings(), NONE) == 0
    assert check_workers(ClusterSettings(), CudaDevices(2)) == 2
    assert check_workers(ClusterSettings(device="cpu"), CudaDevices(2)) == 0
    assert check_workers(ClusterSettings(device="cuda"), CudaDevices(1)) == 1


@pytest.mark.parametrize(
    ("devices", "settings", "words"),
    [
        (NONE, {"device": "cuda"}, "device: got cuda, .*no NVIDIA driver"),
        (CudaDevices(1), {"deterministic": True}, "device: "),  # `auto` takes the GPU
        (NONE, {"lora": "a=/x"}, "lora: got a=/x, allowed: empty without GPUs and vLLM"),
        (
            NONE,
            {"engine": "vllm", "deterministic": True, "device": "cpu"},
            "device: got cpu, allowed: auto or",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_devices_are_refused_with_the_reason(devices, settings, words):
    with pytest.raises(InvalidArgumentError, match=words):
        check_workers(ClusterSettings(**settings), devices)


def test_settings_that_fit_the_devices_pass():
    check_workers(ClusterSettings(deterministic=True, device="cpu"), CudaDevices(1))
    check_workers(ClusterSettings(deterministic=True), NONE)
    assert check_workers(ClusterSettings(engine="native"), CudaDevices(2)) == 0
    assert ClusterSettings(engine="vllm", deterministic=True, dtype="bfloat16").deterministic


@pytest.mark.parametrize(
    ("variables", "field"),
    [
        ({"THREADS": "0"}, "threads"),
        ({"THREADS": "2", "DETERMINISTIC": "1"}, "threads"),
        ({"LISTEN": "127.0.0.1:50051"}, "listen"),
        ({"LISTEN": "here"}, "listen"),
        ({"METRICS_LISTEN": "127.0.0.1:9464"}, "metrics_listen"),
        ({"METRICS_LISTEN": "127.0.0.1:9464-9465"}, "metrics_listen"),
        ({"TLS_CA": "/nowhere/ca.pem"}, "tls_cert"),
        ({"SESSION_TTL_S": "0"}, "session_ttl_s"),
    ],
    ids=str,
)
def test_settings_of_the_roles_in_the_environment_are_checked_too(monkeypatch, variables, field):
    for name, value in variables.items():
        monkeypatch.setenv(f"GAMMARAY_{name}", value)
    with pytest.raises(InvalidArgumentError) as caught:
        check_workers(ClusterSettings(), NONE)
    assert caught.value.field == field


def test_settings_of_the_roles_that_fit_pass(monkeypatch):
    monkeypatch.setenv("GAMMARAY_METRICS_LISTEN", "127.0.0.1:9464-9466")
    monkeypatch.setenv("GAMMARAY_THREADS", "2")
    check_workers(ClusterSettings(), NONE)


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
def test_address_of_another_machine_is_reported_as_the_host(host):
    with pytest.raises(InvalidArgumentError, match=f"host: got {host}"):
        check_port("http_port", host, 8000)


@pytest.mark.parametrize(
    ("settings", "name", "roles"),
    [
        ({"dtype": "float16"}, "dtype", {"draft", "target"}),
        ({"draft_weights": "int8"}, "draft_weights", {"draft"}),
        ({"draft_weights": "int8", "head": "h"}, "draft_weights", {"target"}),
    ],
    ids=["both", "draft", "head"],
)
def test_settings_reach_the_roles_that_have_them_and_defaults_are_left_out(settings, name, roles):
    given = ClusterSettings(**settings)
    own = role_settings(given)
    assert {role for role in own if own[role].get(name, "auto") != "auto"} >= roles
    assert name not in own["orchestrator"]
    for cluster, expected in ((given, roles), (ClusterSettings(), set())):
        printed = serve_document(cluster)["applications"]
        found = {app["name"].removeprefix("gammaray-") for app in printed if name in app["args"]["settings"]}
        assert found == expected


def modules_at_the_refusal(*arguments):
    """Return what the launcher has imported when it refuses a command line, and its exit status."""
    script = (
        # The launcher keeps standard output for its announcement.
        "import json, os, sys\nout = os.fdopen(os.dup(1), 'w')\n"
        "from orchestrator.launcher.cluster import main\n"
        f"status = main({list(arguments)!r})\n"
        "print(json.dumps([status, sorted(sys.modules)]), file=out)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, cwd=ROOT, check=True
    )
    status, names = json.loads(done.stdout)
    return status, set(names), done.stderr


@pytest.mark.parametrize("line", ["--dtype bfloat16 --deterministic", "--http-port 9000 --grpc-port 9000"])
def test_launcher_refuses_before_anything_slow_is_imported(line):
    status, modules, printed = modules_at_the_refusal(*line.split())
    assert status == 2
    assert printed.startswith("gammaray: ")
    assert printed.count("\n") == 1
    assert not modules & {"ray", "torch", "transformers", "fastapi", "redis"}


def test_launcher_refuses_cuda_as_torch_would():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    status, modules, printed = modules_at_the_refusal("--device", "cuda")
    assert status == 2
    assert printed.startswith("gammaray: device: got cuda, allowed: auto or cpu: ")
    assert not modules & {"ray", "torch"}
