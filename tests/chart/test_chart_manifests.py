"""Every manifest of every variant: lint, schemas, which find planted errors, names, one test per template."""

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
from tests.support.chart.manifest_schemas import (
    InvalidManifestError,
    check,
    check_by_kuberay,
    check_pod,
    needs_kuberay,
)

TLS = {"certManager": {"enabled": True, "issuerRef": {"name": "letsencrypt"}}}
COLLECTOR = {"telemetry": {"collector": {"enabled": True}}}
OF_COLLECTOR = "configmap-collector deployment-collector networkpolicy-collector service-collector"
EGRESS = {"networkPolicy": {"egress": {"enabled": True}}}
OF_PASSWORD = " ".join(f"{kind}-redis-password" for kind in ("job", "role", "rolebinding", "serviceaccount"))
CACHE = {"modelCache": {"enabled": True}}
DIFFERENCES = [
    (
        {"workerTls": {"enabled": True, "issuerRef": {"name": "i"}}},
        "certificate-orchestrator certificate-worker",
    ),
    ({"workerTls": {"enabled": True, "orchestratorSecret": "o", "workerSecret": "w"}}, ""),
    ({"tls": TLS, "ingress": {"enabled": True}}, "certificate-public ingress-grpc ingress-http"),
    ({"tls": {**TLS, "secretName": "mine"}, "ingress": {"enabled": True}}, "ingress-grpc ingress-http"),
    (
        {"gateway": {"enabled": True, "className": "c"}, "tls": {"secretName": "s"}},
        "gateway grpcroute httproute",
    ),
    ({"gateway": {"enabled": True, "parentRefs": [{"name": "shared"}]}}, "grpcroute httproute"),
    (COLLECTOR, OF_COLLECTOR),
    ({"telemetry": {"jaeger": {"enabled": True}}}, "deployment-jaeger networkpolicy-jaeger service-jaeger"),
    ({"monitoring": {"dashboards": True}}, "configmap-dashboards"),
    ({"monitoring": {"podMonitor": True}}, "podmonitor"),
    ({"monitoring": {"alerts": True}}, "prometheusrule"),
    ({"monitoring": {"serviceMonitor": True}}, "service-metrics servicemonitor"),
    ({**CACHE, "models": {"target": "/data/large"}}, "pvc-models"),
    ({**CACHE, "models": {"target": "team/large"}}, "job-models pvc-models"),
    ({"modelCache": {"enabled": True, "existingClaim": "mine"}}, ""),
    ({**EGRESS, "draft": {"workers": "1:2"}}, "networkpolicy-egress networkpolicy-egress-head"),
    ({**EGRESS, **COLLECTOR}, f"{OF_COLLECTOR} networkpolicy-egress networkpolicy-egress-collector"),
    (
        {"networkPolicy": {"enabled": False}},
        " ".join(f"networkpolicy-{role}" for role in ("draft", "head", "orchestrator", "redis", "target")),
    ),
    (
        {"redis": {"urlSecret": {"name": "mine"}}},
        f"{OF_PASSWORD} networkpolicy-redis service-redis statefulset-redis",
    ),
    ({"redis": {"passwordSecret": {"name": "mine"}}}, OF_PASSWORD),
    ({"pods": {"disruptionBudget": {"enabled": False}}}, "pdb-draft pdb-orchestrator pdb-target"),
    ({"serviceAccount": {"create": False}}, "serviceaccount"),
]
"""Values, and the templates that they add to or remove from those of the defaults."""

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
def test_names_are_of_the_release_not_too_long_and_without_a_namespace(values):
    long = "a-release-with-a-very-long-name-that-goes-on-and-on"
    for file, manifest in render(values, name=long).items():
        assert len(manifest["metadata"]["name"]) <= 63, file
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == long
    assert all("namespace" not in template["metadata"] for template in pods(values).values())
    for manifest in render(values).values():
        assert "namespace" not in manifest["metadata"]
        assert manifest["metadata"]["name"].startswith(NAME)
        assert manifest["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"


def test_name_overrides_are_applied():
    assert render({"nameOverride": "x"})["rayservice.yaml"]["metadata"]["name"] == "demo-x"
    assert render({"fullnameOverride": "y"})["service-grpc.yaml"]["metadata"]["name"] == "y-grpc"
    assert render(name="my-gammaray")["rayservice.yaml"]["metadata"]["name"] == "my-gammaray"


def test_values_add_and_remove_templates():
    defaults, seen = set(render()), set()
    for values, names in DIFFERENCES:
        shown = set(render(values))
        assert shown ^ defaults == {f"{name}.yaml" for name in names.split()}, values
        seen |= shown
    templates = {path.name for path in (CHART / "templates").glob("*.yaml")}
    assert seen == {name for name in templates if not name.startswith("_")}


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
    assert f"get rayservice {NAME} --output jsonpath='{{.spec.serveConfigV2}}'" in notes
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


def everything():
    return render(VARIANTS["everything"])


def test_unknown_field_is_found_in_every_kind():
    for manifest in everything().values():
        check(manifest)
        manifest.get("spec", manifest)["planted"] = {}
        with pytest.raises(InvalidManifestError, match="planted"):
            check(manifest)
