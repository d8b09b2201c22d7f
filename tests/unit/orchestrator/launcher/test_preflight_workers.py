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


def refusal(devices=NONE, **settings):
    with pytest.raises(InvalidArgumentError) as caught:
        check_workers(ClusterSettings(**settings), devices)
    return caught.value


def test_defaults_pass_with_and_without_gpus():
    assert check_workers(ClusterSettings(), NONE) == 0
    assert check_workers(ClusterSettings(), CudaDevices(2)) == 2
    assert check_workers(ClusterSettings(device="cpu"), CudaDevices(2)) == 0
    assert check_workers(ClusterSettings(device="cuda"), CudaDevices(1)) == 1


def test_cuda_without_a_device_is_refused_with_the_reason():
    error = refusal(device="cuda")
    assert (error.field, error.got) == ("device", "cuda")
    assert "no NVIDIA driver" in error.allowed


def test_deterministic_on_a_machine_with_a_gpu_is_refused():
    """`auto` takes the GPU, which the mode does not cover."""
    assert refusal(CudaDevices(1), deterministic=True).field == "device"


def test_target_over_several_devices_needs_vllm():
    with pytest.raises(InvalidArgumentError, match="tensor_parallel: got 2, allowed: 1 with the engine nat"):
        ClusterSettings(engine="native", tensor_parallel=2)


def test_adapters_need_vllm_and_a_gpu_unless_the_engine_is_given():
    with pytest.raises(InvalidArgumentError, match="lora: got a=/x, allowed: empty without GPUs and vLLM"):
        check_workers(ClusterSettings(lora="a=/x"), NONE)


def test_deterministic_with_vllm_is_for_gpus():
    with pytest.raises(InvalidArgumentError, match="device: got cpu, allowed: auto or cuda with determin"):
        ClusterSettings(engine="vllm", deterministic=True, device="cpu")
    assert ClusterSettings(engine="vllm", deterministic=True, dtype="bfloat16").deterministic


def test_kernel_leaves_gpus_alone():
    assert check_workers(ClusterSettings(engine="native"), CudaDevices(2)) == 0


def test_settings_that_fit_the_gpus_pass():
    check_workers(ClusterSettings(deterministic=True, device="cpu"), CudaDevices(1))
    check_workers(ClusterSettings(deterministic=True), NONE)


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
    assert refusal().field == field


def test_settings_of_the_roles_that_fit_pass(monkeypatch):
    monkeypatch.setenv("GAMMARAY_METRICS_LISTEN", "127.0.0.1:9464-9466")
    monkeypatch.setenv("GAMMARAY_THREADS", "2")
    check_workers(ClusterSettings(), NONE)


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
def test_address_of_another_machine_is_reported_as_the_host(host):
    with pytest.raises(InvalidArgumentError, match=f"host: got {host}"):
        check_port("http_port", host, 8000)


def test_dtype_reaches_both_roles():
    own = role_settings(ClusterSettings(dtype="bfloat16"))
    assert own["target"]["dtype"] == own["draft"]["dtype"] == "bfloat16"
    assert "dtype" not in own["orchestrator"]
    documents = {dtype: serve_document(ClusterSettings(dtype=dtype)) for dtype in ("auto", "float16")}
    printed = {dtype: document["applications"][0]["args"] for dtype, document in documents.items()}
    assert printed["float16"]["settings"]["dtype"] == "float16"
    assert "dtype" not in printed["auto"]["settings"]


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


@pytest.mark.parametrize(
    "line",
    [
        "--tensor-parallel 2",
        "--dtype bfloat16 --deterministic",
        "--http-port 9000 --grpc-port 9000",
        "--start-timeout-s nan",
    ],
)
def test_launcher_refuses_before_anything_slow_is_imported(line):
    status, modules, printed = modules_at_the_refusal(*line.split())
    assert status == 2
    assert printed.startswith("gammaray: ")
    assert printed.count("\n") == 1
    assert not modules & {"ray", "torch", "transformers", "fastapi", "redis"}


def test_draft_weights_reach_drafts_alone():
    own = role_settings(ClusterSettings(draft_weights="int8"))
    assert own["draft"]["draft_weights"] == "int8"
    assert "draft_weights" not in own["target"] | own["orchestrator"]
    headed = role_settings(ClusterSettings(head="h", draft_weights="int8"))
    assert headed["target"]["draft_weights"] == "int8"
    printed = {
        weights: {
            one["name"]: one["args"]["settings"].get("draft_weights")
            for one in serve_document(ClusterSettings(draft_weights=weights))["applications"]
        }
        for weights in ("auto", "int4")
    }
    assert printed["int4"] == printed["auto"] | {"gammaray-draft": "int4"}
    assert not any(printed["auto"].values())


def test_launcher_refuses_cuda_as_torch_would():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    status, modules, printed = modules_at_the_refusal("--device", "cuda")
    assert status == 2
    assert printed.startswith("gammaray: device: got cuda, allowed: auto or cpu: ")
    assert not modules & {"ray", "torch"}
