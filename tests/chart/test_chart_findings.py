"""The chart as platforms use it: changes without a second cluster, names, left-overs, pass-through values."""

import re
import time
from types import SimpleNamespace

import helm_python
import pytest
import yaml
from ray.scripts.scripts import start

from gammaray.deploy import serve_config
from gammaray.errors import UnavailableError
from orchestrator.app import orchestrator
from services.serve.app import draft, target
from tests.support.chart.chart_helpers import (
    CACHED,
    CHART,
    COMPONENTS,
    EVERYTHING,
    NAME,
    ROLES,
    ROOT,
    VARIANTS,
    application,
    at,
    chart,
    cluster,
    container,
    environment,
    every_pod,
    groups,
    merged,
    of_component,
    passing_pods,
    release,
    render,
    render_texts,
)
from tests.support.chart.manifest_schemas import check_release
from tests.support.serve_helpers import schema_of

DIGEST = "sha256:" + "0123456789abcdef" * 4
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
    mount = {"name": "models", "mountPath": "/models"}
    for role, group in groups(CACHED).items():  # the head builds applications
        assert mount in container(group["template"])["volumeMounts"], role


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


# Names, and what is left of a release.


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


# Values that are passed through.

SPEC = {
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
    patch = {"metadata": {"annotations": {"a": "b"}}, "spec": {**SPEC, "containers": [own]}}
    values = merged(EVERYTHING, {"pods": {"patch": patch}})
    without, patched = every_pod(EVERYTHING), every_pod(values)
    assert patched.keys() == without.keys() == COMPONENTS.keys()
    for component, pod in patched.items():
        expected = without[component]
        expected["metadata"].setdefault("annotations", {})["a"] = "b"
        expected["spec"] |= SPEC
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


def test_services_take_fields_of_load_balancers_and_ports_by_name():
    spec = {
        "loadBalancerClass": "service.k8s.aws/nlb",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "ipFamilyPolicy": "PreferDualStack",
        "ports": [{"name": "http", "nodePort": 30080}, {"name": "grpc", "nodePort": 30090}],
    }
    patch = {"spec": spec, "metadata": {"annotations": {"a": "b"}}}
    values = merged(EVERYTHING, {"service": {"patch": patch}})
    for kind, node_port in (("http", 30080), ("grpc", 30090)):
        before, after = (render(given)[f"service-{kind}.yaml"] for given in (EVERYTHING, values))
        ports = [{**before["spec"]["ports"][0], "nodePort": node_port}]
        assert after == merged(before, patch, {"spec": {"ports": ports}})
    check_release(values)


def test_ingresses_have_all_hosts_and_paths():
    ingress = {"enabled": True, "httpHost": "a.example", "grpcHost": "g.example"}
    more = {
        "httpMoreHosts": ["b.example", "a.example"],
        "grpcMoreHosts": ["h.example"],
        "httpPaths": ["/v1", "/health"],
    }
    tls = {"certManager": {"enabled": True, "issuerRef": {"name": "letsencrypt"}}}
    values = {"ingress": {**ingress, **more}, "tls": tls}
    expected = {
        "http": (["a.example", "b.example"], ["/v1", "/health"]),
        "grpc": (["g.example", "h.example"], ["/"]),
    }
    for kind, (hosts, paths) in expected.items():
        spec = render(values)[f"ingress-{kind}.yaml"]["spec"]
        assert [rule["host"] for rule in spec["rules"]] == hosts
        assert spec["tls"] == [{"hosts": hosts, "secretName": f"{NAME}-tls"}]
        for rule in spec["rules"]:
            assert [entry["path"] for entry in rule["http"]["paths"]] == paths
            (backend,) = {str(entry["backend"]["service"]) for entry in rule["http"]["paths"]}
            assert backend == str({"name": f"{NAME}-{kind}", "port": {"name": kind}})
    names = render(values)["certificate-public.yaml"]["spec"]["dnsNames"]
    assert names == ["a.example", "b.example", "g.example", "h.example"]
    allowed = application("orchestrator", values)["args"]["settings"]["allowed_hosts"].split(",")
    assert allowed[-2:] == ["a.example", "b.example"]  # without API keys requests to other names are refused
    check_release(values)


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


def test_extra_objects_are_templates_given_as_maps_or_text():
    name = '{{ include "gammaray.fullname" . }}-extra'
    as_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"key": "1e3"}}
    as_text = f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\ndata: {{key: '1e3'}}\n"
    for extra in (as_map, as_text):
        manifest = render({"extraObjects": [extra]})["extra-objects.yaml"]
        assert manifest == {**as_map, "metadata": {"name": f"{NAME}-extra"}}
    both = render_texts({"extraObjects": [as_map, as_text]})["extra-objects.yaml"]
    assert [entry["kind"] for entry in yaml.safe_load_all(both)] == ["ConfigMap"] * 2


def test_ray_may_have_a_user_of_another_redis():
    given = {"enabled": True, "redisAddress": "redis.example.com:6379", "username": "ray"}
    values = {"ray": {"faultTolerance": given}}
    assert cluster(values)["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis.example.com:6379",
        "redisUsername": {"value": "ray"},
    }
    check_release(values)
    assert "redis-username" in {option.lstrip("-") for parameter in start.params for option in parameter.opts}


def test_yaml_of_the_docs_is_accepted_and_has_its_effect():
    page = (ROOT / "docs" / "install.md").read_text()
    values = merged(*map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)))
    chart().validate_schema(values)
    check_release(values)
    assert render(values)["service-grpc.yaml"]["spec"]["loadBalancerClass"] == "service.k8s.aws/nlb"
    for pod in every_pod(values).values():
        assert pod["spec"]["schedulerName"] == "volcano"
        assert container(pod)["envFrom"] == FROM


def test_pods_without_a_sidecar_of_istio_are_those_of_the_docs():
    (row,) = re.findall(r"\| with Istio's .*", (ROOT / "docs" / "install.md").read_text())
    for path in COMPONENTS.values():
        named = f"`{'.'.join(path)}`" in row
        assert named is (path not in {(role,) for role in ROLES} | {("telemetry", "collector")}), path
    label = {"sidecar.istio.io/inject": "false"}
    for pod in every_pod(merged(EVERYTHING, {"pods": {"labels": label}})).values():
        assert pod["metadata"]["labels"].items() >= label.items()


# Images.


def test_versions_of_images_are_in_the_values_alone_and_the_docs_list_every_image_of_a_release():
    page = (ROOT / "docs" / "install.md").read_text()
    (pattern,) = re.findall(r"helm template .* grep -o '(.*?)'", page)
    for values in VARIANTS.values():
        texts = "\n".join(text for name, text in render_texts(values).items() if name != "NOTES.txt")
        listed = {line.removeprefix(" image: ").strip('"') for line in re.findall(pattern, texts)}
        used = {
            entry["image"]
            for pod in every_pod(values).values()
            for entry in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", []))
        }
        assert listed == used
    tagged = re.compile(r"[a-z]/?[a-z-]+:v?\d+[.]\d+")
    for path in (CHART / "templates").iterdir():
        assert not tagged.search(path.read_text()), path
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    version = re.search(r"instead of the chart's \((.*?)\)", page)[1]
    assert defaults["redis"]["image"].startswith(f"redis:{version}.")
    for component in ("redis", "jaeger", "collector"):
        path = (*COMPONENTS[component], "image")
        assert f"`{'.'.join(path)}`" in page
        values = of_component(
            component, {"image": at(defaults, " ".join(path)).partition(":")[0] + f"@{DIGEST}"}
        )
        chart().validate_schema(values)
        assert DIGEST in str(every_pod(merged(EVERYTHING, values)))
