"""The chart as a platform uses it: changes that must not restart a cluster, names, left-overs, pass-through values."""

import re
import subprocess
import sys
import time
from types import SimpleNamespace

import helm_python
import pytest

from gammaray.deploy import serve_config
from gammaray.errors import UnavailableError
from orchestrator.app import orchestrator
from services.serve.app import draft, target
from tests.support.chart.chart_helpers import (
    EVERYTHING,
    ROLES,
    ROOT,
    application,
    at,
    chart,
    cluster,
    container,
    groups,
    merged,
    passing_pods,
    release,
    render,
)
from tests.support.chart.manifest_schemas import check_release
from tests.support.serve_helpers import schema_of

CACHED = {"modelCache": {"enabled": True}, "models": {"target": "team/large", "draft": "team/small"}}
BUILDERS = {"orchestrator": orchestrator, "draft": draft, "target": target}


# Models.


def test_other_models_and_timeouts_of_their_download_leave_the_cluster_as_it_is():
    """KubeRay starts a second cluster if anything but the number of pods differs."""
    for change in (
        {"models": {"draft": "team/other"}},
        {"models": {"target": "team/other"}},
        {"models": {"target": "/data/large", "draft": "demo"}},
        {"modelCache": {"download": {"timeoutSeconds": 99}}},
    ):
        assert cluster(merged(CACHED, change)) == cluster(CACHED), change
    without = cluster(merged(CACHED, {"modelCache": {"download": {"enabled": False}}}))
    assert without != cluster(CACHED)  # HF_HUB_OFFLINE


def test_each_application_waits_for_the_marks_of_its_own_models():
    folder, *downloaded = container(passing_pods(CACHED)["models"])["command"][3:]
    assert downloaded == ["team/large", "team/small"]
    large, small = f"{folder}/team--large", f"{folder}/team--small"
    for values, expected in (
        (CACHED, {"orchestrator": [large], "draft": [large, small], "target": [large]}),
        ({"models": {"draft": "early-exit:2"}}, {"draft": [large]}),
        ({"models": {"target": "/data/large"}}, {"orchestrator": None, "draft": [small], "target": None}),
        ({"modelCache": {"download": {"enabled": False}}}, dict.fromkeys(BUILDERS)),
        ({"modelCache": {"enabled": False}}, dict.fromkeys(BUILDERS)),
    ):
        for role, marks in expected.items():
            assert application(role, merged(CACHED, values))["args"].get("after") == marks, values
    offline = release(CACHED)
    assert {role for role in ROLES if at(offline, f"env {role} HF_HUB_OFFLINE")} == set(BUILDERS)
    for role, group in groups(CACHED).items():  # the head builds applications
        assert {"name": "models", "mountPath": "/models"} in container(group["template"])["volumeMounts"], role


@pytest.mark.parametrize("role", BUILDERS)
def test_serve_builds_an_application_only_once_its_models_are_downloaded(role, tmp_path, monkeypatch):
    marks, slept = [tmp_path / "team--large", tmp_path / "team--small"], []

    def sleep(seconds):
        marks[len(slept)].touch()
        slept.append(seconds)

    monkeypatch.setattr(serve_config, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    args = {**application(role, CACHED)["args"], "after": [str(mark) for mark in marks]}
    assert schema_of(BUILDERS[role](args)).name
    assert len(slept) == len(marks)
    assert schema_of(BUILDERS[role](args)).name
    assert len(slept) == len(marks)


def test_waiting_for_a_model_ends_after_a_day_with_the_name_of_the_mark(monkeypatch):
    now = iter((0.0, 3600.0, 25 * 3600.0))
    clock = SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None)
    monkeypatch.setattr(serve_config, "time", clock)
    with pytest.raises(UnavailableError, match="within a day: /nowhere/team--large"):
        target({"settings": {}, "after": ["/nowhere/team--large"]})


def test_download_job_leaves_a_model_alone_that_workers_may_read(tmp_path):
    _, *options, folder, large, small = container(passing_pods(CACHED)["models"])["command"]
    assert folder == "/models/ready"
    for name in ("team--large", "team--small"):
        (tmp_path / name).touch()
    ended = subprocess.run(
        [sys.executable, *options, str(tmp_path), large, small],
        env={"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (0, f"{large}: is there\n{small}: is there\n"), ended.stderr


# Hooks, and what is left of a release.


def test_first_hook_fails_before_helms_timeout_so_that_helm_says_so():
    helm_timeout_s = 300
    job = release()["job-redis-password"]
    assert "pre-install" in job["metadata"]["annotations"]["helm.sh/hook"]
    assert job["spec"]["activeDeadlineSeconds"] < helm_timeout_s


# Names.


def test_names_that_kubernetes_or_kuberay_refuses_are_refused_before_anything_is_installed():
    """Services may begin with a digit in Kubernetes 1.36; KubeRay's name must be a label of DNS-1035."""
    for name in ("9lives", "a.b", "team-a.gammaray", "9gammaray"):
        with pytest.raises(helm_python.HelmRenderError, match=f"fullnameOverride: needed.*{name}"):
            render(name=name)
        manifests = render({"fullnameOverride": "lives"}, name=name)
        assert manifests["rayservice.yaml"]["metadata"]["name"] == "lives"
        check_release({"fullnameOverride": "lives"})
    for name in ("a", "gammaray", "a-1", "x" * 53):
        shown = render(name=name)["rayservice.yaml"]["metadata"]["name"]
        assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", shown)
    for values in ({"fullnameOverride": "9lives"}, {"fullnameOverride": "A"}, {"nameOverride": "a.b"}):
        with pytest.raises(helm_python.HelmValuesError, match=next(iter(values))):
            chart().validate_schema(values)


def test_no_manifest_has_an_empty_list_of_egress_which_the_server_would_drop():
    """With it every upgrade changes the policy; `policyTypes` alone denies all egress."""
    for values in (EVERYTHING, {"telemetry": {"jaeger": {"enabled": True}}}):
        policies = {name: m["spec"] for name, m in render(values).items() if m["kind"] == "NetworkPolicy"}
        assert all(spec.get("egress", [{}]) for spec in policies.values())
        for name in ("redis", "jaeger"):
            assert "Egress" in policies[f"networkpolicy-{name}.yaml"]["policyTypes"]
            assert "egress" not in policies[f"networkpolicy-{name}.yaml"]


def test_what_outlives_a_release_has_the_label_by_which_the_docs_delete_it():
    """`helm uninstall` leaves hooks, and claims and Secrets to keep."""
    page = (ROOT / "docs" / "install.md").read_text()
    deleted = re.findall(r"kubectl -n gammaray delete (\S+) --selector (\S+)=gammaray ", page)
    kinds = {kind for kinds, _ in deleted for kind in kinds.split(",")}
    assert {label for _, label in deleted} == {"app.kubernetes.io/instance"}
    for manifest in render(EVERYTHING).values():
        metadata, policy = manifest["metadata"], "helm.sh/hook-delete-policy"
        is_hook = "helm.sh/hook" in metadata.get("annotations", {})
        is_kept = "helm.sh/resource-policy" in metadata.get("annotations", {})
        if is_kept or (is_hook and manifest["kind"] in ("Job", "Pod")):
            assert metadata["labels"]["app.kubernetes.io/instance"] == "demo"
            assert {"PersistentVolumeClaim": "pvc"}.get(manifest["kind"], manifest["kind"].lower()) in kinds
        elif is_hook:
            assert "hook-succeeded" in metadata["annotations"][policy]
    # `helm test --logs` reads the logs of a pod that has succeeded.
    assert "hook-succeeded" not in render()["pod-test.yaml"]["metadata"]["annotations"][policy]
