"""Placement, labels and rights of every pod: given for all pods, overridden by a component, left out."""

from ray.autoscaler._private.kuberay.autoscaling_config import _get_num_gpus

from tests.support.chart.chart_helpers import (
    COMPONENTS,
    EVERYTHING,
    ROLES,
    VARIANTS,
    cluster,
    container,
    environment,
    every_pod,
    groups,
    merged,
    of_component,
    render,
)
from tests.support.chart.manifest_schemas import KUBERAY_CRD, check, check_by_kuberay, check_pod

GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
SPEC = ("tolerations", "nodeSelector", "affinity", "priorityClassName", "runtimeClassName")
USER = ("runAsUser", "runAsGroup", "fsGroup")


def fields(name):
    """Return a value of every field of `pods` that each component takes; no other name has the same ones."""
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": [name]}]}
    return {
        "annotations": {"example.com/annotation": name},
        "labels": {"example.com/label": name},
        "nodeSelector": {"example.com/pool": name},
        "affinity": {
            "nodeAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [],
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [zone]},
            }
        },
        "tolerations": [
            {"key": "dedicated", "operator": "Equal", "value": name, "tolerationSeconds": 2_000_000}
        ],
        "priorityClassName": f"priority-{name}",
        "runtimeClassName": f"runtime-{name}",
        "securityContext": {"runAsUser": 1_000_650_000, "seLinuxOptions": {"level": name}},
        "containerSecurityContext": {"readOnlyRootFilesystem": False, "seLinuxOptions": {"level": name}},
    }


def assert_has(template, given, component):
    """Check that a pod has the given fields, beside the chart's own."""
    spec, only = template["spec"], container(template)
    assert template["metadata"]["annotations"].items() >= given["annotations"].items(), component
    assert template["metadata"]["labels"].items() >= given["labels"].items(), component
    has_gpu = any("nvidia.com/" in name for name in only["resources"]["limits"])
    assert spec["tolerations"] == given["tolerations"] + [GPU_TAINT] * has_gpu, component
    assert spec["nodeSelector"].items() >= given["nodeSelector"].items(), component
    for field in ("affinity", "priorityClassName", "runtimeClassName"):
        assert spec[field] == given[field], (component, field)
    assert spec["securityContext"].items() >= given["securityContext"].items(), component
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, component
    waits = [entry for entry in spec.get("initContainers", []) if entry["name"] == "wait-for-models"]
    for entry in (only, *waits):
        assert entry["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            **given["containerSecurityContext"],
        }, component


def assert_valid(values):
    for manifest in render(values).values():
        check(manifest)
    if KUBERAY_CRD.is_file():
        check_by_kuberay(render(values)["rayservice.yaml"])
    for template in every_pod(values).values():
        check_pod(template)


def test_every_pod_of_every_variant_has_what_is_given_for_all_pods():
    given, seen = fields("all"), set()
    for values in VARIANTS.values():
        values = merged(values, {"pods": given})
        found = every_pod(values)
        seen |= found.keys()
        for component, template in found.items():
            assert_has(template, given, component)
        assert_valid(values)
    assert seen == COMPONENTS.keys()


def test_a_component_overrides_what_is_given_for_all_pods():
    own = merged(*(of_component(component, fields(component)) for component in COMPONENTS))
    for values in VARIANTS.values():
        values = merged(values, {"pods": fields("all")}, own)
        for component, template in every_pod(values).items():
            assert_has(template, fields(component), component)
        assert_valid(values)
        if cluster(values).get("autoscalerOptions"):  # a container of the head's pod
            context = cluster(values)["autoscalerOptions"]["securityContext"]
            assert context == container(groups(values)["head"]["template"])["securityContext"]


def test_by_default_pods_run_anywhere_but_for_the_taint_of_gpus():
    on = {
        "telemetry": {"jaeger": {"enabled": True}, "collector": {"enabled": True}},
        "modelCache": {"enabled": True},
        "models": {"target": "team/large", "draft": "team/small"},
    }
    found = every_pod(on)
    assert found.keys() == COMPONENTS.keys()
    for component, template in found.items():
        placed = {"tolerations"} if component in ("draft", "target") else set()
        assert {*SPEC, "imagePullSecrets"} & template["spec"].keys() == placed, component
        assert template["spec"].get("tolerations", [GPU_TAINT]) == [GPU_TAINT]
    without = every_pod({"draft": {"gpus": 0}, "gpuTolerations": []})
    assert not [name for name, template in without.items() if "tolerations" in template["spec"]]
    amd = {"gpuTolerations": [{"key": "amd.com/gpu", "operator": "Exists"}], "draft": {"gpus": 0}}
    assert groups(amd)["target"]["template"]["spec"]["tolerations"] == amd["gpuTolerations"]
    assert "tolerations" not in groups(amd)["draft"]["template"]["spec"]


def test_pods_run_as_the_user_of_their_image_or_of_the_cluster():
    ids = {"redis": 999, "jaeger": 10001, "collector": 10001}
    for component, template in every_pod(EVERYTHING).items():
        context = template["spec"]["securityContext"]
        assert {context[name] for name in USER} == {ids.get(component, 1000)}, component
    cluster_chooses = merged(EVERYTHING, {"pods": {"runAsImageUser": False}})
    for component, template in every_pod(cluster_chooses).items():
        context = template["spec"]["securityContext"]
        assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}, component
    values = merged(EVERYTHING, of_component("redis", {"runAsImageUser": False}))
    for component, template in every_pod(values).items():
        assert ("runAsUser" in template["spec"]["securityContext"]) is (component != "redis")


def test_labels_and_annotations_of_the_chart_stay():
    taken = {
        "labels": {"app.kubernetes.io/component": "mine", "gammaray.io/ray": "false"},
        "annotations": {"helm.sh/hook": "mine", "checksum/config": "mine"},
    }
    plain, given = every_pod(EVERYTHING), every_pod(merged(EVERYTHING, {"pods": taken}))
    assert plain.keys() == given.keys()
    for component, template in plain.items():
        for kind in ("labels", "annotations"):
            shown = given[component]["metadata"][kind].items()
            assert shown >= template["metadata"][kind].items(), component


def test_every_container_of_the_chart_has_resources_that_can_be_given():
    own = {"requests": {"cpu": "3"}, "limits": {"cpu": "3", "memory": "3Gi"}}
    values = merged(EVERYTHING, *(of_component(component, {"resources": own}) for component in COMPONENTS))
    for component, template in every_pod(values).items():
        spec = template["spec"]
        for entry in (*spec["containers"], *spec.get("initContainers", [])):
            if entry["name"] in ("agent", "prepare"):  # those of the values
                continue
            limits = {key: value for key, value in entry["resources"]["limits"].items() if "/" not in key}
            assert limits == own["limits"], (component, entry["name"])
            assert entry["resources"]["requests"]["cpu"] == "3", (component, entry["name"])
            assert ("nvidia.com/gpu" in entry["resources"]["limits"]) is (
                entry["name"] in ("ray-draft", "ray-target")
            )


def test_environment_and_volumes_are_those_of_pods_that_connect_to_other_networks():
    client = {*ROLES, "models", "collector"}
    for component, template in every_pod(EVERYTHING).items():
        names = [entry["name"] for entry in container(template).get("env", [])]
        mounts = [mount["name"] for mount in container(template).get("volumeMounts", [])]
        volumes = [volume["name"] for volume in template["spec"].get("volumes", [])]
        for found, name in ((names, "EXTRA"), (mounts, "extra"), (volumes, "extra")):
            assert found.count(name) == (component in client), component
    own = [of_component(component, {"env": [{"name": "OWN", "value": component}]}) for component in client]
    for component, template in every_pod(merged(EVERYTHING, *own)).items():
        shown = environment(template)
        assert shown.get("OWN") == (component if component in client else None)
        assert "EXTRA" not in shown


def test_given_variables_replace_those_of_the_chart():
    """A list with two variables of one name is refused by server-side apply."""
    given = [{"name": "HF_HOME", "value": "/mine"}, {"name": "OTEL_TRACES_SAMPLER", "value": "always_off"}]
    for component, template in every_pod(merged(EVERYTHING, {"pods": {"env": given}})).items():
        entries = container(template).get("env", [])
        names = [entry["name"] for entry in entries]
        assert len(names) == len(set(names)), component
        if component in (*ROLES, "models", "collector"):
            assert all(entry in entries for entry in given), component


def test_pools_may_have_different_gpu_resources():
    values = {"draft": {"gpuResource": "nvidia.com/mig-1g.10gb"}, "target": {"gpus": 2}}
    for given, expected in (
        ({}, {"draft": ("nvidia.com/gpu", 1), "target": ("nvidia.com/gpu", 2)}),
        (values, {"draft": ("nvidia.com/mig-1g.10gb", 1), "target": ("nvidia.com/gpu", 2)}),
        (
            {**values, "gpuResource": "amd.com/gpu"},
            {"draft": ("nvidia.com/mig-1g.10gb", 1), "target": ("amd.com/gpu", 2)},
        ),
        ({**values, "draft": {**values["draft"], "gpus": 0}}, {"target": ("nvidia.com/gpu", 2)}),
    ):
        given = merged({"target": {"gpus": 2}}, given)
        for role, group in groups(given).items():
            resources = container(group["template"])["resources"]
            asked = {
                (name, int(count))
                for kind in ("limits", "requests")
                for name, count in resources[kind].items()
                if "/" in name
            }
            assert asked == ({expected[role]} if role in expected else set()), role
            # Ray detects names that end with "gpu" only, so the chart gives it the number.
            counted = _get_num_gpus({}, group["rayStartParams"], resources, role)
            assert (counted or 0) == expected.get(role, ("", 0))[1], role
        assert_valid(given)


def test_storage_class_is_the_default_a_name_or_none():
    for given, expected in ((None, None), ("", None), ("-", ""), ("fast", "fast"), ("123", "123")):
        chosen = {} if given is None else {"storageClassName": given}
        manifests = render({"redis": chosen, "modelCache": {"enabled": True, **chosen}})
        (claim,) = manifests["statefulset-redis.yaml"]["spec"]["volumeClaimTemplates"]
        for spec in (claim["spec"], manifests["pvc-models.yaml"]["spec"]):
            assert spec.get("storageClassName") == expected
            assert ("storageClassName" in spec) is (expected is not None)


def test_null_removes_a_field_of_a_security_context():
    removed = {
        "securityContext": {"fsGroup": None, "seccompProfile": None},
        "containerSecurityContext": {"capabilities": None},
    }
    values = merged(EVERYTHING, {"pods": removed})
    for component, template in every_pod(values).items():
        context = template["spec"]["securityContext"]
        assert context.keys() == {
            *("runAsNonRoot", "runAsUser", "runAsGroup", "fsGroupChangePolicy"),
        }, component
        assert "capabilities" not in container(template)["securityContext"], component
    assert_valid(values)
