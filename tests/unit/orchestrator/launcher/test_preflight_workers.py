"""Settings that workers would reject after the start of a cluster are rejected before it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gammaray
from gammaray.config import ClusterSettings
from gammaray.deploy.serve_config import role_settings
from gammaray.errors import InvalidArgumentError
from orchestrator.launcher.preflight import check_host, check_port, check_workers, worker_cores, worker_gpus

ROOT = Path(gammaray.__file__).parents[1]


def test_defaults_take_the_gpus_that_there_are():
    check_workers(ClusterSettings())
    assert worker_gpus(ClusterSettings(), 0) == {"target": 0.0, "draft": 0.0}
    assert worker_gpus(ClusterSettings(), 2) == {"target": 1.0, "draft": 1.0}
    assert worker_gpus(ClusterSettings(device="cuda"), 1) == {"target": 0.5, "draft": 0.5}
    for settings in ({"device": "cpu"}, {"engine": "native"}):
        assert worker_gpus(ClusterSettings(**settings), 2) == {"target": 0.0, "draft": 0.0}


def test_settings_that_do_not_fit_the_devices_are_refused_with_the_reason():
    with pytest.raises(InvalidArgumentError, match=r"device: got cuda, .*Ray finds no GPU"):
        worker_gpus(ClusterSettings(device="cuda"), 0)
    with pytest.raises(InvalidArgumentError, match="device: got cpu, allowed: auto or"):
        check_workers(ClusterSettings(engine="vllm", deterministic=True, device="cpu"))
    check_workers(ClusterSettings(deterministic=True, device="cpu"))
    assert ClusterSettings(engine="vllm", deterministic=True, dtype="bfloat16").deterministic


@pytest.mark.parametrize(
    ("variables", "field"),
    [
        ({"THREADS": "0"}, "threads"),
        ({"THREADS": "2", "DETERMINISTIC": "1"}, "threads"),
        ({"CACHE_MEMORY_SHARE": "inf"}, "cache_memory_share"),
        ({"SESSION_TTL_S": "0"}, "session_ttl_s"),
    ],
    ids=str,
)
def test_settings_of_the_roles_in_the_environment_are_checked_too(monkeypatch, variables, field):
    for name, value in variables.items():
        monkeypatch.setenv(f"GAMMARAY_{name}", value)
    with pytest.raises(InvalidArgumentError) as caught:
        check_workers(ClusterSettings())
    assert caught.value.field == field


def test_settings_of_the_roles_that_fit_pass(monkeypatch):
    monkeypatch.setenv("GAMMARAY_METRICS_LISTEN", "127.0.0.1:9464-9466")
    monkeypatch.setenv("GAMMARAY_THREADS", "2")
    check_workers(ClusterSettings())


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
def test_settings_reach_the_roles_that_have_them(settings, name, roles):
    own = role_settings(ClusterSettings(**settings))
    assert {role for role in own if own[role].get(name, "auto") != "auto"} >= roles
    assert name not in own["orchestrator"]


REFUSED = """
import json, os, sys
out = os.fdopen(os.dup(1), "w")  # the launcher keeps standard output for its announcement
from orchestrator.launcher.cluster import main
status = main(["--dtype", "bfloat16", "--deterministic"])
print(json.dumps([status, sorted(sys.modules)]), file=out)
"""


def test_launcher_refuses_before_anything_slow_is_imported():
    command = [sys.executable, "-c", REFUSED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, check=True)
    status, modules = json.loads(done.stdout)
    assert status == 2
    assert done.stderr.startswith("gammaray: ")
    assert done.stderr.count("\n") == 1
    assert not {"ray", "torch", "transformers", "fastapi", "redis"}.intersection(modules)


@pytest.mark.parametrize(
    ("cores", "num_targets", "num_drafts", "threads", "wanted"),
    [
        ({1, 0}, 1, 1, 1, {"target": (0,), "draft": (1,)}),
        ({3, 4, 5, 9}, 2, 1, 1, {"target": (3, 4), "draft": (5,)}),
        ({0, 1}, 1, 0, 1, {"target": (0,), "draft": ()}),
        ({0}, 1, 1, 1, {"target": (), "draft": ()}),
        ({0, 1}, 2, 1, 1, {"target": (), "draft": ()}),
        ({0, 1, 2, 3, 4}, 1, 1, 2, {"target": (0, 1), "draft": (2, 3)}),
        ({0, 1, 2}, 1, 1, 2, {"target": (), "draft": ()}),
    ],
)
def test_worker_cores_are_disjoint_or_none(cores, num_targets, num_drafts, threads, wanted):
    assert worker_cores(cores, num_targets, num_drafts, threads) == wanted


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_host_at_which_the_proxy_reaches_its_replicas_is_taken(host):
    check_host(host)


@pytest.mark.parametrize("host", ["127.0.0.2", "192.0.2.1"])
def test_other_host_is_refused(host):
    with pytest.raises(InvalidArgumentError, match=f"host: got {host}, allowed: 127.0.0.1, or 0.0.0.0"):
        check_host(host)


def test_orchestrators_alone_have_no_workers_and_need_a_redis():
    cluster = ClusterSettings(target_workers="0", redis_url="redis://127.0.0.1")
    assert (cluster.target_workers.maximum, cluster.draft_workers.maximum) == (0, 0)
    with pytest.raises(InvalidArgumentError, match="target_workers: got 0, allowed: at least 1"):
        ClusterSettings(target_workers="0")
