"""Every manifest of every variant: lint, schemas, names, and one test per template."""

import helm_python
import pytest

from tests.support.chart.chart_helpers import (
    CHART,
    NAME,
    NAMESPACE,
    RELEASE,
    VARIANTS,
    container,
    merged,
    passing_pods,
    pods,
    render,
    render_texts,
)
from tests.support.chart.manifest_schemas import check, check_by_kuberay, check_pod, needs_kuberay

TEMPLATES = sorted(
    path.name
    for path in (CHART / "templates").iterdir()
    if not path.name.startswith("_") and path.suffix == ".yaml"
)
ALWAYS = {
    "configmap-serve.yaml",
    "pod-test.yaml",
    "rayservice.yaml",
    "service-grpc.yaml",
    "service-http.yaml",
}
TLS = {"certManager": {"enabled": True, "issuerRef": {"name": "letsencrypt"}}}
MADE_PASSWORD = ({}, {"redis": {"passwordSecret": {"name": "mine"}}})

OPTIONAL = {
    "certificate-orchestrator.yaml": ({"workerTls": {"enabled": True, "issuerRef": {"name": "i"}}}, {}),
    "certificate-public.yaml": (
        {"tls": TLS, "ingress": {"enabled": True}},
        {"tls": {**TLS, "secretName": "mine"}, "ingress": {"enabled": True}},
    ),
    "certificate-worker.yaml": (
        {"workerTls": {"enabled": True, "issuerRef": {"name": "i"}}},
        {"workerTls": {"enabled": True, "orchestratorSecret": "o", "workerSecret": "w"}},
    ),
    "configmap-collector.yaml": ({"telemetry": {"collector": {"enabled": True}}}, {}),
    "configmap-dashboards.yaml": ({"monitoring": {"dashboards": True}}, {}),
    "deployment-collector.yaml": ({"telemetry": {"collector": {"enabled": True}}}, {}),
    "deployment-jaeger.yaml": ({"telemetry": {"jaeger": {"enabled": True}}}, {}),
    "gateway.yaml": (
        {"gateway": {"enabled": True, "className": "c"}, "tls": {"secretName": "s"}},
        {"gateway": {"enabled": True, "parentRefs": [{"name": "shared"}]}},
    ),
    "grpcroute.yaml": ({"gateway": {"enabled": True, "parentRefs": [{"name": "shared"}]}}, {}),
    "httproute.yaml": ({"gateway": {"enabled": True, "parentRefs": [{"name": "shared"}]}}, {}),
    "ingress-grpc.yaml": ({"ingress": {"enabled": True}}, {}),
    "ingress-http.yaml": ({"ingress": {"enabled": True}}, {}),
    "job-models.yaml": (
        {"modelCache": {"enabled": True}, "models": {"target": "team/large"}},
        {"modelCache": {"enabled": True}, "models": {"target": "/data/large"}},
    ),
    "job-redis-password.yaml": MADE_PASSWORD,
    "networkpolicy-collector.yaml": (
        {"telemetry": {"collector": {"enabled": True}}},
        {"telemetry": {"collector": {"enabled": True}}, "networkPolicy": {"enabled": False}},
    ),
    "networkpolicy-draft.yaml": ({}, {"networkPolicy": {"enabled": False}}),
    "networkpolicy-egress.yaml": ({"networkPolicy": {"egress": {"enabled": True}}}, {}),
    "networkpolicy-egress-collector.yaml": (
        {"networkPolicy": {"egress": {"enabled": True}}, "telemetry": {"collector": {"enabled": True}}},
        {"telemetry": {"collector": {"enabled": True}}},
    ),
    "networkpolicy-egress-head.yaml": (
        {"networkPolicy": {"egress": {"enabled": True}}, "draft": {"workers": "1:2"}},
        {"networkPolicy": {"egress": {"enabled": True}}},
    ),
    "networkpolicy-head.yaml": ({}, {"networkPolicy": {"enabled": False}}),
    "networkpolicy-jaeger.yaml": ({"telemetry": {"jaeger": {"enabled": True}}}, {}),
    "networkpolicy-orchestrator.yaml": ({}, {"networkPolicy": {"enabled": False}}),
    "networkpolicy-redis.yaml": ({}, {"redis": {"urlSecret": {"name": "mine"}}}),
    "networkpolicy-target.yaml": ({}, {"networkPolicy": {"enabled": False}}),
    "pdb-draft.yaml": ({}, {"draft": {"disruptionBudget": {"enabled": False}}}),
    "pdb-orchestrator.yaml": ({}, {"pods": {"disruptionBudget": {"enabled": False}}}),
    "pdb-target.yaml": ({}, {"target": {"disruptionBudget": {"enabled": False}}}),
    "podmonitor.yaml": ({"monitoring": {"podMonitor": True}}, {}),
    "prometheusrule.yaml": ({"monitoring": {"alerts": True}}, {}),
    "pvc-models.yaml": (
        {"modelCache": {"enabled": True}},
        {"modelCache": {"enabled": True, "existingClaim": "mine"}},
    ),
    "role-redis-password.yaml": MADE_PASSWORD,
    "rolebinding-redis-password.yaml": MADE_PASSWORD,
    "serviceaccount-redis-password.yaml": MADE_PASSWORD,
    "service-collector.yaml": ({"telemetry": {"collector": {"enabled": True}}}, {}),
    "service-jaeger.yaml": ({"telemetry": {"jaeger": {"enabled": True}}}, {}),
    "service-metrics.yaml": ({"monitoring": {"serviceMonitor": True}}, {"monitoring": {"podMonitor": True}}),
    "service-redis.yaml": ({}, {"redis": {"urlSecret": {"name": "mine"}}}),
    "serviceaccount.yaml": ({}, {"serviceAccount": {"create": False}}),
    "servicemonitor.yaml": ({"monitoring": {"serviceMonitor": True}}, {}),
    "statefulset-redis.yaml": ({}, {"redis": {"urlSecret": {"name": "mine"}}}),
}
"""Template -> values with which it is there, and values without."""

variants = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)


@variants
def test_lint_finds_nothing(values):
    report = helm_python.lint(CHART, values, strict=True, namespace=NAMESPACE)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@variants
def test_every_manifest_fits_its_schema(values):
    for manifest in render(values).values():
        check(manifest)
    for template in (*pods(values).values(), *passing_pods(values).values()):
        check_pod(template)


@needs_kuberay
@variants
def test_rayservice_fits_kuberays_schema(values):
    check_by_kuberay(render(values)["rayservice.yaml"])


@variants
def test_no_template_sets_a_namespace(values):
    for file, manifest in render(values).items():
        assert "namespace" not in manifest["metadata"], file
    for template in pods(values).values():
        assert "namespace" not in template["metadata"]


@variants
def test_names_are_of_the_release_and_not_too_long(values):
    long = "a-release-with-a-very-long-name-that-goes-on-and-on"
    for file, manifest in render(values, name=long).items():
        assert len(manifest["metadata"]["name"]) <= 63, file
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == long
    for manifest in render(values).values():
        assert manifest["metadata"]["name"].startswith(NAME)
        assert manifest["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"


def test_streams_may_be_given_more_time_at_a_gateway():
    rule = render(VARIANTS["everything"])["httproute.yaml"]["spec"]["rules"][0]
    assert rule["timeouts"] == {"request": "3600s"}
    route = render({"gateway": {"enabled": True, "parentRefs": [{"name": "shared"}]}})["httproute.yaml"]
    assert "timeouts" not in route["spec"]["rules"][0]


def test_name_overrides_are_applied():
    assert render({"nameOverride": "x"})["rayservice.yaml"]["metadata"]["name"] == "demo-x"
    assert render({"fullnameOverride": "y"})["service-grpc.yaml"]["metadata"]["name"] == "y-grpc"
    assert render(name="my-gammaray")["rayservice.yaml"]["metadata"]["name"] == "my-gammaray"


def test_every_template_has_its_test():
    assert sorted(ALWAYS | OPTIONAL.keys()) == TEMPLATES


def test_some_templates_are_always_rendered():
    for variant, values in VARIANTS.items():
        assert render(values).keys() >= ALWAYS, variant


@pytest.mark.slow
def test_optional_templates_are_rendered_only_if_enabled():
    for template, (on, off) in OPTIONAL.items():
        assert template in render_texts(on), template
        assert template not in render_texts(off), template


@variants
def test_references_name_rendered_resources(values):
    """ConfigMaps, Secrets, claims, Services and service accounts of the release's own exist."""
    manifests = render(values).values()
    made = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    made |= {("Secret", m["spec"]["secretName"]) for m in manifests if m["kind"] == "Certificate"}
    if makes := passing_pods(values).get("redis-password"):
        made.add(("Secret", container(makes)["command"][3]))
    wanted = set(references(list(manifests)))
    assert {pair for pair in wanted if pair[1].startswith(NAME)} <= made


def references(node):
    if isinstance(node, list):
        for entry in node:
            yield from references(entry)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key == "serviceAccountName":
            yield "ServiceAccount", value
        elif key == "secretName":
            yield "Secret", value
        elif key == "secretKeyRef":
            yield "Secret", value["name"]
        elif key == "configMap" and "name" in value:
            yield "ConfigMap", value["name"]
        elif key == "claimName":
            yield "PersistentVolumeClaim", value
        elif key == "service" and isinstance(value, dict) and "name" in value:
            yield "Service", value["name"]
        elif key == "backendRefs":
            yield from (("Service", entry["name"]) for entry in value)
        else:
            yield from references(value)


def test_references_helper_finds_missing_resources():
    manifests = [{"spec": {"volumes": [{"configMap": {"name": "gone"}}], "serviceAccountName": "missing"}}]
    assert set(references(manifests)) == {("ConfigMap", "gone"), ("ServiceAccount", "missing")}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"gateway": {"enabled": True}}, "gateway.parentRefs"),
        ({"gateway": {"enabled": True, "className": "c"}}, "tls.secretName"),
        ({"tls": TLS}, "ingress.enabled"),
        ({"tls": {"certManager": {"enabled": True}}, "ingress": {"enabled": True}}, "issuerRef.name"),
        ({"workerTls": {"enabled": True}}, "workerTls.issuerRef.name"),
        (
            {"redis": {"urlSecret": {"name": "r"}}, "networkPolicy": {"egress": {"enabled": True}}},
            "networkPolicy.egress.rules",
        ),
        (
            {"models": {"target": "team/large"}, "networkPolicy": {"egress": {"enabled": True}}},
            "networkPolicy.egress.rules",
        ),
        (
            {"redis": {"urlSecret": {"name": "r"}}, "ray": {"faultTolerance": {"enabled": True}}},
            "ray.faultTolerance.redisAddress",
        ),
    ],
)
def test_contradicting_values_are_rejected_with_the_reason(values, reason):
    with pytest.raises(helm_python.HelmRenderError, match=reason.replace(".", "[.]")):
        render_texts(values)


def test_notes_contain_the_next_commands():
    notes = render_texts()["NOTES.txt"]
    assert f"kubectl --namespace {NAMESPACE} wait rayservice/{NAME}" in notes
    assert "gammaray generate" in notes
    assert "gammaray config -" in notes
    assert f"helm test {RELEASE} --namespace {NAMESPACE}" in notes
    assert "NOTE: requests need no API key" in notes
    secured = merged({"apiKeysSecret": {"name": "k"}}, {"redis": {"urlSecret": {"name": "r"}}})
    assert "NOTE" not in render_texts(secured)["NOTES.txt"]
    assert "https://gammaray.example.com/v1" in render_texts(VARIANTS["everything"])["NOTES.txt"]


@pytest.mark.parametrize("outside", [{}, {"ingress": {"enabled": True}}])
def test_notes_mention_a_key_only_if_keys_are_required(outside):
    open_, secured = (render_texts({**outside, "apiKeysSecret": {"name": n}})["NOTES.txt"] for n in ("", "k"))
    assert "GAMMARAY_API_KEY" not in open_
    assert "authorization" not in open_
    assert "export GAMMARAY_API_KEY=" in secured
    assert ("authorization: Bearer $GAMMARAY_API_KEY" in secured) is bool(outside)
    assert ("curl http://gammaray.example.com/v1/completions" in secured) is bool(outside)


def test_notes_name_the_images_in_use():
    values = {"image": {"registry": "r.example.com/t", "tag": "7"}, "draft": {"gpus": 0}}
    notes = render_texts(values)["NOTES.txt"]
    for image in ("orchestrator", "worker-gpu", "worker-cpu"):
        assert f"   r.example.com/t/gammaray-{image}:7\n" in notes
    assert "worker-cpu" not in render_texts()["NOTES.txt"]
