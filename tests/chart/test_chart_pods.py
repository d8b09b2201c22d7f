"""Every pod of every variant: rights, variables, placement, resources, what selects it, and patches."""

import importlib
import json
import math
import re

import helm_python
import pytest
import yaml
from ray._private import ray_constants
from ray.autoscaler._private.kuberay.autoscaling_config import _get_custom_resources, _get_num_gpus
from ray.scripts.scripts import start

import gammaray
from gammaray.config import PoolSize
from gammaray.deploy.serve_config import APPLICATIONS, GRPC_SERVICERS, SERVE_ENVIRONMENT
from tests.support.chart.chart_helpers import (
    CACHED,
    CHART,
    COMPONENTS,
    EVERYTHING,
    ROLES,
    ROOT,
    VARIANTS,
    chart,
    cluster,
    container,
    environment,
    every_pod,
    groups,
    merged,
    of_component,
    pods,
    release,
    render,
    serve_config,
)
from tests.support.chart.manifest_schemas import check_release
from tests.support.serve_helpers import schema_of

GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
SPEC = ("tolerations", "nodeSelector", "affinity", "priorityClassName", "runtimeClassName")
LEAST = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SECCOMP = {"type": "RuntimeDefault"}
CLIENTS = {*ROLES, "models", "collector"}
"""Pods that connect to other networks."""


def test_every_pod_has_no_more_rights_than_it_needs():
    own = {"pods": {"env": [{"name": "HF_HOME", "value": "/mine"}]}}
    for values in (*VARIANTS.values(), merged(EVERYTHING, own)):
        staying, scales = pods(values), cluster(values).get("enableInTreeAutoscaling", False)
        for name, template in every_pod(values).items():
            spec, only = template["spec"], container(template)
            assert spec["securityContext"]["runAsNonRoot"] is True, name
            assert spec["securityContext"]["runAsUser"] > 0
            assert spec["securityContext"]["seccompProfile"] == SECCOMP
            assert only["securityContext"] == {**LEAST, "readOnlyRootFilesystem": True}
            assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
            for volume in spec.get("volumes", []):
                assert "hostPath" not in volume
                assert volume.get("emptyDir") != {} or volume["name"] == "extra", "without a bound"
            assert only["resources"].keys() == {"requests", "limits"}
            assert ("readinessProbe" in only) is (name in staying)
            assert ":" in only["image"].rpartition("/")[2]
            assert not only["image"].endswith(":latest")
            has_token = name == "redis-password" or (name == "head" and scales)
            assert spec["automountServiceAccountToken"] is has_token, name
            names = [entry["name"] for entry in only.get("env", [])]
            assert len(names) == len(set(names)), name  # server-side apply refuses two of one name
            secrets = {key for key, value in environment(template).items() if isinstance(value, dict)}
            arguments = json.dumps([only.get("command", []), only.get("args", [])])
            assert not [key for key in secrets if f"$({key})" in arguments], name


def test_ray_pods_have_the_environment_writable_paths_and_resources_of_gammaray_up():
    known = {option.removeprefix("--") for parameter in start.params for option in parameter.opts}
    assert hasattr(ray_constants, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")
    for values in VARIANTS.values():
        for role, group in groups(values).items():
            labels, shown = group["template"]["metadata"]["labels"], environment(group["template"])
            assert "app.kubernetes.io/name" not in labels  # KubeRay's own
            assert labels["app.kubernetes.io/component"] == role
            assert shown.items() >= SERVE_ENVIRONMENT.items()
            assert "GAMMARAY_REDIS_URL" in shown
            mounts = {mount["mountPath"] for mount in container(group["template"])["volumeMounts"]}
            assert {"/tmp", "/models"} <= mounts
            for name in ("HOME", "HF_HOME", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"):
                assert any(f"{shown[name]}/".startswith(f"{mount}/") for mount in mounts), name
            params, limits = group["rayStartParams"], container(group["template"])["resources"]["limits"]
            assert params.keys() <= known
            offered = _get_num_gpus({}, params, container(group["template"])["resources"], role)
            assert int(limits.get("nvidia.com/gpu", 0)) == (offered or 0)
            if role != "head":
                assert _get_custom_resources({}, params, role) == {f"gammaray_{role}": 1}


def test_pods_of_a_role_are_spread_and_have_a_disruption_budget():
    for role in ("orchestrator", "draft", "target"):
        (constraint,) = groups()[role]["template"]["spec"]["topologySpreadConstraints"]
        budget = render()[f"pdb-{role}.yaml"]["spec"]
        for selector in (constraint["labelSelector"], budget["selector"]):
            labels = groups()[role]["template"]["metadata"]["labels"]
            assert labels.items() >= selector["matchLabels"].items()


def test_serve_configuration_is_valid_and_builders_accept_it():
    from ray.serve.schema import ServeDeploySchema

    of_role = {application.name: application for application in APPLICATIONS.values()}
    for values in VARIANTS.values():
        models = {"target": "demo", "draft": "demo", **values.get("models", {})}
        parsed = ServeDeploySchema.model_validate(serve_config(values))
        assert parsed.grpc_options.grpc_servicer_functions == list(GRPC_SERVICERS)
        for entry in serve_config(values)["applications"]:
            role, (deployment,) = of_role[entry["name"]].role, entry["deployments"]
            assert entry["args"]["settings"]["model"] == models.get(role, models["target"])
            entry["args"].pop("after", None)  # the builder would wait for the models
            module, _, function = entry["import_path"].partition(":")
            built = schema_of(getattr(importlib.import_module(module), function)(entry["args"]))
            assert built.name == deployment["name"]
            number = PoolSize.parse(entry["args"]["workers" if role in models else "replicas"])
            if role in models:
                assert built.max_replicas_per_node == 1
            if number.is_elastic:
                assert built.autoscaling_config.max_replicas == number.maximum
            # Each replica uses the resources of one pod; KubeRay's shell takes the outer quotes away.
            taken, group = deployment["ray_actor_options"], groups(values)[role]
            offered = json.loads(json.loads(group["rayStartParams"]["resources"]))
            assert offered == taken["resources"] == {of_role[entry["name"]].resource: 1}
            limits = container(group["template"])["resources"]["limits"]
            assert int(limits.get("nvidia.com/gpu", 0)) == taken.get("num_gpus", 0)


def test_default_configuration_differs_from_the_package_only_as_needed():
    """With the values that say what the package's defaults say, nothing else is different."""
    values = {"orchestrator": {"replicas": 1}, "draft": {"gpus": 0}, "target": {"gpus": 0}}
    own, package = serve_config(values), yaml.safe_load((CHART / "files" / "serve.yaml").read_text())
    for entry in own["applications"]:
        entry["deployments"][0]["ray_actor_options"].pop("num_gpus", None)
        for name in ("allowed_hosts", "device", "tensor_parallel"):
            entry["args"]["settings"].pop(name, None)
    assert own == package


def test_services_select_exactly_the_pods_they_are_for():
    for values in VARIANTS.values():
        found = pods(values)
        goals = {"http": {"orchestrator"}, "grpc": {"orchestrator"}, "metrics": set(ROLES) & set(found)}
        services = {file: entry for file, entry in render(values).items() if entry["kind"] == "Service"}
        for file, manifest in services.items():
            kind = file.removeprefix("service-").removesuffix(".yaml")
            selector = manifest["spec"]["selector"].items()
            selected = {name for name, pod in found.items() if pod["metadata"]["labels"].items() >= selector}
            assert selected == goals.get(kind, {kind})
            ports = [port for name in selected for port in container(found[name])["ports"]]
            known = {key for port in ports for key in (port["name"], port["containerPort"])}
            assert {port.get("targetPort", port["port"]) for port in manifest["spec"]["ports"]} <= known


def test_secrets_are_mounted_where_settings_read_them_and_only_there():
    found, plain = release(EVERYTHING), release()["args"]
    pools, files = ("orchestrator", "draft", "target"), {"api_keys_file", "receipt_keys_file"}
    for secret, expected in {
        "keys": {"orchestrator"},
        "receipts": {"orchestrator"},
        "demo-gammaray-worker-tls": {"draft", "target"},
        "demo-gammaray-orchestrator-tls": {"orchestrator"},
    }.items():
        holders = {name for name, spec in found["pods"].items() if f"'secretName': '{secret}'" in str(spec)}
        assert holders == expected
    for role in pools:
        mounted = {mount["mountPath"] for mount in found["containers"][role]["volumeMounts"]}
        shown = found["args"][role]["settings"]
        keys = [shown[name] for name in files & shown.keys()]
        assert len(keys) == (2 if role == "orchestrator" else 0)
        assert {shown["tls_dir"], *(path.rpartition("/")[0] for path in keys)} <= mounted
        assert not {"tls_dir", *files} & plain[role]["settings"].keys()


def test_versions_and_the_documented_size_are_those_of_package_and_trial():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert cluster()["rayVersion"] == pinned["ray"] == metadata["annotations"]["gammaray.io/ray"]
    assert metadata["appVersion"] == gammaray.__version__
    trial = pods(VARIANTS["cpu-trial"]).values()
    requests, units = [container(pod)["resources"]["requests"] for pod in trial], {"Gi": 1.0, "Mi": 2**-10}
    cpus = sum(float(r["cpu"].removesuffix("m")) / (1000 if "m" in r["cpu"] else 1) for r in requests)
    gib = sum(float(r["memory"][:-2]) * units[r["memory"][-2:]] for r in requests)
    text = (CHART / "examples" / "cpu-trial.yaml").read_text()
    assert f"{round(cpus)} CPUs and {math.ceil(gib)} GiB" in text


def fields(name):
    """Return a value of every field of `pods` that each component takes; no other name has the same ones."""
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": [name]}]}
    affinity = {
        "preferredDuringSchedulingIgnoredDuringExecution": [],
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [zone]},
    }
    toleration = {"key": "dedicated", "operator": "Equal", "value": name, "tolerationSeconds": 2_000_000}
    return {
        "annotations": {"example.com/annotation": name},
        "labels": {"example.com/label": name},
        "nodeSelector": {"example.com/pool": name},
        "affinity": {"nodeAffinity": affinity},
        "tolerations": [toleration],
        "priorityClassName": f"priority-{name}",
        "runtimeClassName": f"runtime-{name}",
        "securityContext": {"runAsUser": 1_000_650_000, "seLinuxOptions": {"level": name}},
        "containerSecurityContext": {"readOnlyRootFilesystem": False, "seLinuxOptions": {"level": name}},
    }


def assert_has(template, given, component):
    spec, only = template["spec"], container(template)
    has_gpu = any("nvidia.com/" in name for name in only["resources"]["limits"])
    assert spec["tolerations"] == given["tolerations"] + [GPU_TAINT] * has_gpu, component
    for shown, field in (
        *((template["metadata"], field) for field in ("annotations", "labels")),
        *((spec, field) for field in ("nodeSelector", "securityContext")),
    ):
        assert shown[field].items() >= given[field].items(), (component, field)
    for field in ("affinity", "priorityClassName", "runtimeClassName"):
        assert spec[field] == given[field], (component, field)
    assert spec["securityContext"]["seccompProfile"] == SECCOMP, component
    waits = [entry for entry in spec.get("initContainers", []) if entry["name"] == "wait-for-models"]
    for entry in (only, *waits):
        assert entry["securityContext"] == {**LEAST, **given["containerSecurityContext"]}, component


def test_every_pod_has_what_is_given_for_all_pods_or_for_its_component():
    common = merged(EVERYTHING, {"pods": fields("all")})
    own = merged(common, *(of_component(component, fields(component)) for component in COMPONENTS))
    assert every_pod(own).keys() == COMPONENTS.keys()
    for component, template in every_pod(own).items():
        assert_has(every_pod(common)[component], fields("all"), component)
        assert_has(template, fields(component), component)
    check_release(common)
    check_release(own)
    context = cluster(own)["autoscalerOptions"]["securityContext"]  # of a container of the head's pod
    assert context == container(groups(own)["head"]["template"])["securityContext"]


def test_by_default_pods_run_anywhere_but_for_the_taint_of_gpus():
    on = {"telemetry": {"jaeger": {"enabled": True}, "collector": {"enabled": True}}, **CACHED}
    assert every_pod(on).keys() == COMPONENTS.keys()
    for component, template in every_pod(on).items():
        placed = {"tolerations"} if component in ("draft", "target") else set()
        assert {*SPEC, "imagePullSecrets"} & template["spec"].keys() == placed, component
        assert template["spec"].get("tolerations", [GPU_TAINT]) == [GPU_TAINT]
    for tolerations in ([], [{"key": "amd.com/gpu", "operator": "Exists"}]):
        found = release({"draft": {"gpus": 0}, "gpuTolerations": tolerations})["pods"]
        assert found["target"].get("tolerations", []) == tolerations
        assert "tolerations" not in found["draft"]


def test_pods_run_as_the_user_of_their_image_or_of_the_cluster():
    ids = {"redis": 999, "jaeger": 10001, "collector": 10001}
    cluster_chooses = release(merged(EVERYTHING, {"pods": {"runAsImageUser": False}}))["pods"]
    one_chooses = release(merged(EVERYTHING, of_component("redis", {"runAsImageUser": False})))["pods"]
    removing = {"securityContext": {"fsGroup": None, "seccompProfile": None}}  # null removes a field
    removing["containerSecurityContext"] = {"capabilities": None}
    removed = release(merged(EVERYTHING, {"pods": removing}))
    for component, spec in release(EVERYTHING)["pods"].items():
        users = {spec["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")}
        assert users == {ids.get(component, 1000)}, component
        assert spec["imagePullSecrets"] == [{"name": "registry"}], component
        context = cluster_chooses[component]["securityContext"]
        assert context == {"runAsNonRoot": True, "seccompProfile": SECCOMP}, component
        assert ("runAsUser" in one_chooses[component]["securityContext"]) is (component != "redis")
        kept = {"runAsNonRoot", "runAsUser", "runAsGroup", "fsGroupChangePolicy"}
        assert removed["pods"][component]["securityContext"].keys() == kept, component
        assert "capabilities" not in removed["containers"][component]["securityContext"], component
    check_release(merged(EVERYTHING, {"pods": removing}))


def test_own_labels_variables_volumes_and_resources_stand_beside_or_instead_of_the_charts():
    variables = {"HF_HOME": "/mine", "OTEL_TRACES_SAMPLER": "always_off"}
    taken = {
        "labels": {"app.kubernetes.io/component": "mine", "gammaray.io/ray": "false"},
        "annotations": {"helm.sh/hook": "mine", "checksum/config": "mine"},
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }
    resources = {"requests": {"cpu": "3"}, "limits": {"cpu": "3", "memory": "3Gi"}}
    own = [of_component(component, {"resources": resources}) for component in COMPONENTS]
    own += [of_component(component, {"env": [{"name": "OWN", "value": component}]}) for component in CLIENTS]
    changed, overridden = every_pod(merged(EVERYTHING, {"pods": taken})), every_pod(merged(EVERYTHING, *own))
    for component, template in every_pod(EVERYTHING).items():
        is_client = component in CLIENTS
        for kind in ("labels", "annotations"):
            shown = changed[component]["metadata"][kind].items()
            assert shown >= template["metadata"][kind].items(), component
        for listed in (container(template).get("volumeMounts", []), template["spec"].get("volumes", [])):
            assert [entry["name"] for entry in listed].count("extra") == is_client, component
        assert ("EXTRA" in environment(template)) is is_client
        assert not is_client or environment(changed[component]).items() >= variables.items(), component
        shown = environment(overridden[component])
        assert shown.get("OWN") == (component if is_client else None)
        assert "EXTRA" not in shown
        spec = overridden[component]["spec"]
        for entry in (*spec["containers"], *spec.get("initContainers", [])):
            if entry["name"] in ("agent", "prepare"):  # those of the values
                continue
            limits = entry["resources"]["limits"]
            assert {key: limits[key] for key in ("cpu", "memory")} == resources["limits"], entry["name"]
            assert entry["resources"]["requests"]["cpu"] == "3", (component, entry["name"])
            assert ("nvidia.com/gpu" in limits) is (entry["name"] in ("ray-draft", "ray-target"))


def test_dashboards_are_those_of_the_folder():
    data = render(EVERYTHING)["configmap-dashboards.yaml"].get("data") or {}
    assert set(data) == {path.name for path in (CHART / "dashboards").glob("*.json")}


PASSED = {
    "schedulerName": "volcano",
    "dnsPolicy": "None",
    "dnsConfig": {"nameservers": ["10.0.0.10"]},
    "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["redis.example.com"]}],
    "resourceClaims": [{"name": "gpu"}],  # its other fields differ between versions of Kubernetes
}
FROM = [{"secretRef": {"name": "proxy"}}]
LIFECYCLE = {"preStop": {"exec": {"command": ["sleep", "5"]}}}


def test_patch_of_all_pods_reaches_the_metadata_spec_and_own_container_of_each():
    own = {"envFrom": FROM, "lifecycle": LIFECYCLE}
    patch = {"metadata": {"annotations": {"a": "b"}}, "spec": {**PASSED, "containers": [own]}}
    values = merged(EVERYTHING, {"pods": {"patch": patch}})
    without, patched = every_pod(EVERYTHING), every_pod(values)
    assert patched.keys() == without.keys() == COMPONENTS.keys()
    for component, pod in patched.items():
        expected = without[component]
        expected["metadata"].setdefault("annotations", {})["a"] = "b"
        expected["spec"] |= PASSED
        container(expected).update(own)
        assert pod == expected, component
    check_release(values)
    assert (
        render(values)["job-models.yaml"]["metadata"]["name"]
        != render(EVERYTHING)["job-models.yaml"]["metadata"]["name"]
    )


def test_patch_of_a_component_merges_named_entries_replaces_other_lists_and_removes_nulls():
    entries = {
        "env": [{"name": "HF_HOME", "value": "/mine"}, {"name": "NEW", "value": "1"}],
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp", "subPath": "a"},
            {"name": "tmp", "mountPath": "/b"},
        ],
        "resources": {"limits": {"nvidia.com/gpu": None}, "claims": [{"name": "gpu"}]},
        "readinessProbe": None,
    }
    sidecar = {"name": "beside", "image": "registry.example.com/beside:1"}
    spec = {
        "containers": [{"name": "ray-target", **entries}, sidecar],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "20Gi"}}, {"name": "new", "emptyDir": {}}],
        "tolerations": [{"operator": "Exists"}],
        "topologySpreadConstraints": None,
        "terminationGracePeriodSeconds": 2_000_000,
    }
    values = {"target": {"patch": {"spec": spec}}, "pods": {"patch": {"metadata": {"labels": {"x": "1e3"}}}}}
    before, after = groups()["target"]["template"], groups(values)["target"]["template"]
    old, new = container(before), container(after)
    assert environment(after) == {**environment(before), "HF_HOME": "/mine", "NEW": "1"}
    mounts = {entry["mountPath"]: entry for entry in new["volumeMounts"]}
    assert mounts.keys() == {entry["mountPath"] for entry in old["volumeMounts"]} | {"/b"}
    assert mounts["/tmp"] == {"name": "tmp", "mountPath": "/tmp", "subPath": "a"}
    assert new["resources"]["limits"] == {"cpu": "8", "memory": "64Gi"}
    assert new["resources"]["requests"] == old["resources"]["requests"]
    assert "readinessProbe" not in new
    assert after["spec"]["containers"][1:] == [sidecar]
    volumes = {volume["name"]: volume for volume in after["spec"]["volumes"]}
    assert volumes.keys() == {volume["name"] for volume in before["spec"]["volumes"]} | {"new"}
    assert volumes["tmp"]["emptyDir"] == {"sizeLimit": "20Gi"}
    assert after["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert "topologySpreadConstraints" not in after["spec"]
    assert after["spec"]["terminationGracePeriodSeconds"] == 2_000_000
    labels = {name: pod["metadata"]["labels"].get("x") for name, pod in every_pod(values).items()}
    assert set(labels.values()) == {"1e3"}
    assert groups(values)["draft"]["template"]["spec"] == groups()["draft"]["template"]["spec"]
    check_release(values)


def test_patch_of_an_unknown_container_or_field_is_refused():
    for component in COMPONENTS:
        missing = {"patch": {"spec": {"containers": [{"name": "missing", "envFrom": FROM}]}}}
        values = merged(EVERYTHING, of_component(component, missing))
        with pytest.raises(helm_python.HelmRenderError, match=f'"{component}" has no container "missing"'):
            render(values)
    for values in ({"pods": {"patch": {"sepc": {}}}}, {"service": {"patch": {"status": {}}}}):
        with pytest.raises(helm_python.HelmValuesError, match=r"sepc|status"):
            chart().validate_schema(values)


def test_common_labels_are_on_every_object_and_pod_and_replace_none_of_the_charts():
    own = {"app.kubernetes.io/name": "mine", "app.kubernetes.io/component": "mine", "gammaray.io/ray": "mine"}
    values = merged(EVERYTHING, {"commonLabels": {"cost-centre": "1e3", **own}})
    before, after = render(EVERYTHING), render(values)
    for file, manifest in after.items():
        if file != "job-models.yaml":  # whose name follows its pod
            assert manifest["metadata"]["name"] == before[file]["metadata"]["name"]
        assert manifest["metadata"]["labels"]["cost-centre"] == "1e3"
        assert manifest["metadata"]["labels"].items() >= before[file]["metadata"]["labels"].items()
        for field in ("selector", "podSelector", "volumeClaimTemplates"):  # cannot change
            assert manifest.get("spec", {}).get(field) == before[file].get("spec", {}).get(field), file
    for component, pod in every_pod(values).items():
        assert pod["metadata"]["labels"]["cost-centre"] == "1e3"
        assert (
            pod["metadata"]["labels"].items()
            >= every_pod(EVERYTHING)[component]["metadata"]["labels"].items()
        )
        if component in ROLES:
            assert "app.kubernetes.io/name" not in pod["metadata"]["labels"]  # KubeRay's own
    check_release(values)


def test_pods_without_a_sidecar_of_istio_are_those_of_the_docs():
    (row,) = re.findall(r"\| with Istio's .*", (ROOT / "docs" / "install.md").read_text())
    for path in COMPONENTS.values():
        named = f"`{'.'.join(path)}`" in row
        assert named is (path not in {(role,) for role in ROLES} | {("telemetry", "collector")}), path
    label = {"sidecar.istio.io/inject": "false"}
    for pod in every_pod(merged(EVERYTHING, {"pods": {"labels": label}})).values():
        assert pod["metadata"]["labels"].items() >= label.items()


def test_yaml_of_the_docs_is_accepted_and_has_its_effect():
    page = (ROOT / "docs" / "install.md").read_text()
    values = merged(*map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)))
    chart().validate_schema(values)
    check_release(values)
    assert render(values)["service-grpc.yaml"]["spec"]["loadBalancerClass"] == "service.k8s.aws/nlb"
    for pod in every_pod(values).values():
        assert pod["spec"]["schedulerName"] == "volcano"
        assert container(pod)["envFrom"] == FROM


def test_ray_may_have_a_user_of_another_redis():
    given = {"enabled": True, "redisAddress": "redis.example.com:6379", "username": "ray"}
    values = {"ray": {"faultTolerance": given}}
    assert cluster(values)["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis.example.com:6379",
        "redisUsername": {"value": "ray"},
    }
    check_release(values)
    assert "redis-username" in {option.lstrip("-") for parameter in start.params for option in parameter.opts}
