"""Users, placement and contents of pods; bounds, autoscaling, spreading and disruption budgets of pools."""

import json
import math

import pytest
import yaml

from gammaray.deploy.serve_config import APPLICATIONS, SERVE_ENVIRONMENT, WORKER_PORT
from tests.support.chart.chart_helpers import (
    CHART,
    EVERYTHING,
    REGISTRY,
    ROLES,
    ROOT,
    VARIANTS,
    application,
    cluster,
    container,
    environment,
    groups,
    passing_pods,
    pods,
    render,
    serve_config,
)

variants = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)


@variants
def test_every_pod_has_no_more_rights_than_it_needs(values):
    staying = pods(values)
    for name, template in {**staying, **passing_pods(values)}.items():
        spec, only = template["spec"], container(template)
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert all("hostPath" not in volume for volume in spec.get("volumes", []))
        assert only["resources"].keys() == {"requests", "limits"}
        assert ("readinessProbe" in only) is (name in staying)
        assert ":" in only["image"].rpartition("/")[2]
        assert not only["image"].endswith(":latest")


@variants
def test_only_the_autoscaler_and_the_password_job_have_a_kubernetes_token(values):
    for name, template in passing_pods(values).items():
        assert template["spec"]["automountServiceAccountToken"] is (name == "redis-password")
    for name, template in pods(values).items():
        scales = cluster(values).get("enableInTreeAutoscaling", False)
        assert template["spec"]["automountServiceAccountToken"] is (name == "head" and scales)


@variants
def test_every_ray_pod_has_the_environment_of_gammaray_up_and_no_label_of_kuberay(values):
    for role, group in groups(values).items():
        labels = group["template"]["metadata"]["labels"]
        assert "app.kubernetes.io/name" not in labels
        assert labels["app.kubernetes.io/component"] == role
        shown = environment(group["template"])
        assert shown.items() >= SERVE_ENVIRONMENT.items()
        assert "GAMMARAY_REDIS_URL" in shown
        names = [entry["name"] for entry in container(group["template"])["env"]]
        assert len(names) == len(set(names))


@variants
def test_writable_paths_are_volumes(values):
    for group in groups(values).values():
        mounts = {mount["mountPath"] for mount in container(group["template"])["volumeMounts"]}
        shown = environment(group["template"])
        assert {"/tmp", "/models"} <= mounts
        for name in ("HOME", "HF_HOME", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"):
            assert any(f"{shown[name]}/".startswith(f"{mount}/") for mount in mounts), name


@pytest.mark.parametrize(("grace", "drained"), [(60, "50"), (5, "0")])
def test_ray_drains_replicas_before_a_pod_is_killed(grace, drained):
    from ray._private import ray_constants

    name = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    assert hasattr(ray_constants, name)
    for group in groups({"pods": {"terminationGracePeriodSeconds": grace}}).values():
        assert environment(group["template"])[name] == drained


def test_probes_match_the_ports_of_each_role():
    found = groups()
    for role in ROLES:
        only = container(found[role]["template"])
        for probe in ("startupProbe", "livenessProbe") if role != "head" else ("startupProbe",):
            port = int(found[role]["rayStartParams"]["dashboard-agent-listen-port"])
            assert only[probe]["httpGet"] == {"path": "/api/local_raylet_healthz", "port": port}
    readiness = {role: container(found[role]["template"])["readinessProbe"] for role in ROLES}
    assert readiness["draft"]["grpc"] == readiness["target"]["grpc"] == {"port": WORKER_PORT}
    assert readiness["orchestrator"]["httpGet"] == {"path": "/-/healthz", "port": 8000}
    assert readiness["head"]["httpGet"]["port"] == 8265


def test_probe_of_a_worker_with_tls_needs_no_certificate():
    readiness = container(groups(EVERYTHING)["draft"]["template"])["readinessProbe"]
    assert readiness["tcpSocket"] == {"port": WORKER_PORT}
    assert "grpc" not in readiness


@variants
def test_each_replica_uses_the_resources_of_one_pod(values):
    of_role = {application.name: application for application in APPLICATIONS.values()}
    for entry in serve_config(values)["applications"]:
        application = of_role[entry["name"]]
        group = groups(values)[application.role]
        (deployment,) = entry["deployments"]
        taken = deployment["ray_actor_options"]
        # KubeRay hands this to a shell, which takes the outer quotes away.
        offered = group["rayStartParams"]["resources"]
        assert json.loads(json.loads(offered)) == taken["resources"] == {application.resource: 1}
        limits = container(group["template"])["resources"]["limits"]
        assert int(limits.get("nvidia.com/gpu", 0)) == taken.get("num_gpus", 0)


def test_rays_own_autoscaler_reads_the_resources():
    from ray.autoscaler._private.kuberay.autoscaling_config import _get_custom_resources

    params = groups()["draft"]["rayStartParams"]
    assert _get_custom_resources({}, params, "draft") == {"gammaray_draft": 1}


def test_workers_have_shared_memory_of_the_size_in_the_values():
    found = groups({"target": {"gpus": 2, "shmSize": "3Gi"}})
    for role, size in (("target", "3Gi"), ("draft", "1Gi")):
        template = found[role]["template"]
        (volume,) = (one for one in template["spec"]["volumes"] if one["name"] == "shm")
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": size}
        assert {"name": "shm", "mountPath": "/dev/shm"} in container(template)["volumeMounts"]
    for role in ("head", "orchestrator"):  # KubeRay mounts its own
        mounts = container(found[role]["template"])["volumeMounts"]
        assert "/dev/shm" not in {mount["mountPath"] for mount in mounts}


def test_start_parameters_are_options_of_ray():
    from ray.scripts.scripts import start

    known = {option.removeprefix("--") for parameter in start.params for option in parameter.opts}
    for group in groups(EVERYTHING).values():
        assert group["rayStartParams"].keys() <= known


def test_trial_requests_the_documented_resources():
    values = VARIANTS["cpu-trial"]
    requests = [container(template)["resources"]["requests"] for template in pods(values).values()]
    units = {"Gi": 1.0, "Mi": 2**-10}
    cpus = sum(float(r["cpu"].removesuffix("m")) / (1000 if "m" in r["cpu"] else 1) for r in requests)
    gib = sum(float(r["memory"][:-2]) * units[r["memory"][-2:]] for r in requests)
    text = (CHART / "examples" / "cpu-trial.yaml").read_text()
    assert f"{round(cpus)} CPUs and {math.ceil(gib)} GiB" in text


def test_accelerator_is_a_node_label_of_the_role():
    values = {"draft": {"acceleratorType": "NVIDIA-L4"}, "pods": {"nodeSelector": {"pool": "a"}}}
    found = groups(values)
    assert found["draft"]["template"]["spec"]["nodeSelector"] == {
        "nvidia.com/gpu.product": "NVIDIA-L4",
        "pool": "a",
    }
    assert found["target"]["template"]["spec"]["nodeSelector"] == {"pool": "a"}


@variants
def test_services_select_exactly_the_pods_they_are_for(values):
    found = pods(values)
    goals = {"http": {"orchestrator"}, "grpc": {"orchestrator"}, "metrics": set(ROLES) & set(found)}
    for file, manifest in render(values).items():
        if manifest["kind"] != "Service":
            continue
        kind = file.removeprefix("service-").removesuffix(".yaml")
        selector = manifest["spec"]["selector"].items()
        selected = {name for name, pod in found.items() if pod["metadata"]["labels"].items() >= selector}
        assert selected == goals.get(kind, {kind})
        ports = {
            key
            for name in selected
            for port in container(found[name])["ports"]
            for key in (port["name"], port["containerPort"])
        }
        for port in manifest["spec"]["ports"]:
            assert port.get("targetPort", port["port"]) in ports


def test_secrets_are_mounted_only_in_pods_that_need_them():
    found = pods(EVERYTHING)
    holders = {
        name: {volume.get("secret", {}).get("secretName") for volume in template["spec"].get("volumes", [])}
        for name, template in found.items()
    }
    assert {name for name, secrets in holders.items() if "keys" in secrets} == {"orchestrator"}
    worker_tls = {name for name, secrets in holders.items() if "demo-gammaray-worker-tls" in secrets}
    assert worker_tls == {"draft", "target"}
    assert "demo-gammaray-orchestrator-tls" in holders["orchestrator"]
    assert environment(found["target"])["HF_TOKEN"] == {
        "secretKeyRef": {"name": "hugging-face", "key": "token"}
    }


def test_ray_version_is_the_one_that_is_installed():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert cluster()["rayVersion"] == pinned["ray"] == chart["annotations"]["gammaray.io/ray"]


def test_versions_are_those_of_the_package():
    import gammaray

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == gammaray.__version__
    image = container(groups()["head"]["template"])["image"]
    assert image == f"{REGISTRY['image']['registry']}/gammaray-orchestrator:{gammaray.__version__}"
    image = container(groups(EVERYTHING)["head"]["template"])["image"]
    assert image == "registry.example.com/team/gammaray-orchestrator:1.2.3"


def test_custom_init_containers_run_after_the_model_download():
    spec = groups(EVERYTHING)["target"]["template"]["spec"]
    assert [entry["name"] for entry in spec["initContainers"]] == ["wait-for-models", "prepare"]


def test_every_pod_has_the_credentials_of_the_registry():
    for name, template in {**pods(EVERYTHING), **passing_pods(EVERYTHING)}.items():
        assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}], name


@pytest.mark.parametrize(
    ("workers", "bounds", "replicas"),
    [("3", (3, 3), 3), (2, (2, 2), 2), ("1:4", (1, 4), 1), ("0:4", (0, 4), 1)],
)
def test_pool_has_the_bounds_asked_for(workers, bounds, replicas):
    values = {"draft": {"workers": workers}}
    group = groups(values)["draft"]
    assert (group["minReplicas"], group["maxReplicas"]) == bounds
    assert group["replicas"] == replicas
    scales = bounds[0] < bounds[1]
    assert cluster(values).get("enableInTreeAutoscaling", False) is scales
    assert ("autoscalerOptions" in cluster(values)) is scales


def test_pool_without_drafters_is_left_out():
    assert set(groups({"draft": {"workers": "0"}})) == {"head", "orchestrator", "target"}


def test_pods_of_a_role_are_spread_and_have_a_disruption_budget():
    manifests = render()
    for role in ("orchestrator", "draft", "target"):
        (constraint,) = groups()[role]["template"]["spec"]["topologySpreadConstraints"]
        labels = groups()[role]["template"]["metadata"]["labels"]
        assert labels.items() >= constraint["labelSelector"]["matchLabels"].items()
        budget = manifests[f"pdb-{role}.yaml"]["spec"]
        assert labels.items() >= budget["selector"]["matchLabels"].items()
    assert "topologySpreadConstraints" not in groups()["head"]["template"]["spec"]


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({}, {"orchestrator": 1, "draft": 0, "target": 0}),
        ({"orchestrator": {"replicas": 5}, "draft": {"workers": 3}}, {"orchestrator": 4, "draft": 2}),
        ({"draft": {"workers": "0:8"}, "target": {"workers": "3:6"}}, {"draft": 0, "target": 2}),
        ({"pods": {"disruptionBudget": {"maxUnavailable": 2}}}, {"orchestrator": 0, "target": 0}),
        ({"target": {"workers": 2, "disruptionBudget": {"maxUnavailable": 0}}}, {"target": 2}),
    ],
)
def test_budgets_let_nodes_be_drained(values, kept):
    """Pods of an operator can be counted only by a `minAvailable` that is a number."""
    manifests = render(values)
    for role, count in kept.items():
        budget = manifests[f"pdb-{role}.yaml"]["spec"]
        assert budget["minAvailable"] == count
        assert "maxUnavailable" not in budget


@pytest.mark.parametrize(("replicas", "bounds"), [(3, (3, 3)), ("3", (3, 3)), ("2:6", (2, 6))])
def test_orchestrators_have_the_bounds_asked_for(replicas, bounds):
    values = {"orchestrator": {"replicas": replicas}, "scaling": {"orchestrator_load": 7}}
    group = groups(values)["orchestrator"]
    assert (group["minReplicas"], group["maxReplicas"], group["replicas"]) == (*bounds, bounds[0])
    scales = bounds[0] < bounds[1]
    assert cluster(values).get("enableInTreeAutoscaling", False) is scales
    args = application("orchestrator", values)["args"]
    assert args["replicas"] == ("2:6" if scales else 3)
    assert args.get("scaling") == ({"orchestrator_load": 7} if scales else None)
    assert "scaling" not in application("draft", values)["args"]  # workers that stay report nothing
    assert render(values)["pdb-orchestrator.yaml"]["spec"]["minAvailable"] == bounds[0] - 1
