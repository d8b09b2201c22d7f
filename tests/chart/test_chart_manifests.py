"""Every manifest of every variant: lint, schemas, names, references; values are documented."""

import re
import sys
from collections import Counter
from pathlib import Path

import helm_python
import jsonschema
import pytest
import yaml

from tests.support.chart.chart_helpers import (
    CHART,
    EVERYTHING,
    NAME,
    NAMESPACE,
    REGISTRY,
    RELEASE,
    ROLES,
    ROOT,
    VARIANTS,
    chart,
    container,
    merged,
    passing_pods,
    pods,
    read_yaml,
    release,
    render,
    render_texts,
)
from tests.support.chart.manifest_schemas import (
    InvalidManifestError,
    check,
    check_by_kuberay,
    check_release,
    needs_kuberay,
)

COLLECTOR = {"telemetry": {"collector": {"enabled": True}}}
OF_COLLECTOR = "configmap-collector deployment-collector networkpolicy-collector service-collector"
EGRESS = {"networkPolicy": {"egress": {"enabled": True}}}
OF_PASSWORD = " ".join(f"{kind}-redis-password" for kind in ("job", "role", "rolebinding", "serviceaccount"))
POLICIES = " ".join(f"networkpolicy-{role}" for role in ("draft", "head", "orchestrator", "redis", "target"))
CACHE = {"modelCache": {"enabled": True}}
ISSUER = {"issuerRef": {"name": "letsencrypt"}}
URL = {"urlSecret": {"name": "mine"}}
TLS = {"certManager": {"enabled": True, **ISSUER}}
DIFFERENCES = [
    ({"workerTls": {"enabled": True, **ISSUER}}, "certificate-orchestrator certificate-worker"),
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
    ({"networkPolicy": {"enabled": False}}, POLICIES),
    ({"redis": URL}, f"{OF_PASSWORD} networkpolicy-redis service-redis statefulset-redis"),
    ({"redis": {"passwordSecret": {"name": "mine"}}}, OF_PASSWORD),
    ({"pods": {"disruptionBudget": {"enabled": False}}}, "pdb-draft pdb-orchestrator pdb-target"),
    ({"serviceAccount": {"create": False}}, "serviceaccount"),
    ({"extraObjects": [{"kind": "Namespace"}]}, "extra-objects"),
]
"""Values, and the templates that they add to or remove from those of the defaults."""

LONG = "a-release-with-a-very-long-name-that-goes-on-and-on"


def test_lint_schemas_and_names_of_every_variant_are_right():
    for values in VARIANTS.values():
        report = helm_python.lint(CHART, values, strict=True, namespace=NAMESPACE)
        assert report["errors"] == []
        assert [message for message in report["messages"] if message["severity"] > 1] == []
        check_release(values)
        for file, manifest in render(values, name=LONG).items():
            assert len(manifest["metadata"]["name"]) <= 63, file
            assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == LONG
        assert all("namespace" not in template["metadata"] for template in pods(values).values())
        for manifest in render(values).values():
            assert "namespace" not in manifest["metadata"]
            assert manifest["metadata"]["name"].startswith(NAME)
            assert manifest["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
            assert manifest["kind"] != "Secret"
    assert render(name="my-gammaray")["rayservice.yaml"]["metadata"]["name"] == "my-gammaray"


@needs_kuberay
def test_rayservices_fit_kuberays_schema():
    for values in VARIANTS.values():
        check_by_kuberay(render(values)["rayservice.yaml"])


def test_values_add_and_remove_templates():
    defaults, seen = set(render()), set()
    for values, names in DIFFERENCES:
        shown = set(render(values))
        assert shown ^ defaults == {f"{name}.yaml" for name in names.split()}, values
        seen |= shown
    templates = {path.name for path in (CHART / "templates").glob("*.yaml")}
    assert seen == {name for name in templates if not name.startswith("_")}


def test_references_name_rendered_resources():
    """ConfigMaps, Secrets, claims, Services and service accounts of the release's own exist."""
    for values in VARIANTS.values():
        manifests = render(values).values()
        made = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
        made |= {("Secret", m["spec"]["secretName"]) for m in manifests if m["kind"] == "Certificate"}
        if makes := passing_pods(values).get("redis-password"):
            made.add(("Secret", container(makes)["command"][3]))
        assert {pair for pair in references(list(manifests)) if pair[1].startswith(NAME)} <= made


REFERENCES = {
    **{"secretName": "Secret", "secretKeyRef": "Secret", "configMap": "ConfigMap", "service": "Service"},
    **{"serviceAccountName": "ServiceAccount", "claimName": "PersistentVolumeClaim"},
}
"""Key -> the kind that its value refers to: a name, or an object with one."""


def references(node):
    for entry in node if isinstance(node, list) else ():
        yield from references(entry)
    for key, value in node.items() if isinstance(node, dict) else ():
        if key in REFERENCES:
            yield REFERENCES[key], value["name"] if isinstance(value, dict) else value
        elif key == "backendRefs":
            yield from (("Service", entry["name"]) for entry in value)
        else:
            yield from references(value)


def test_notes_contain_the_next_commands_and_mention_a_key_only_if_keys_are_required():
    notes = render_texts()["NOTES.txt"]
    for text in (
        f"kubectl --namespace {NAMESPACE} wait rayservice/{NAME}",
        "gammaray generate",
        f"get rayservice {NAME} --output jsonpath='{{.spec.serveConfigV2}}'",
        f"helm test {RELEASE} --namespace {NAMESPACE}",
        "NOTE: requests need no API key",
    ):
        assert text in notes
    assert "https://gammaray.example.com/v1" in render_texts(EVERYTHING)["NOTES.txt"]
    for ingress in (False, True):
        values = {"ingress": {"enabled": ingress}, "redis": {"urlSecret": {"name": "r"}}}
        plain = render_texts(values)["NOTES.txt"]
        secured = render_texts({**values, "apiKeysSecret": {"name": "k"}})["NOTES.txt"]
        assert "GAMMARAY_API_KEY" not in plain
        assert "authorization" not in plain
        assert "NOTE" not in secured
        assert "export GAMMARAY_API_KEY=" in secured
        assert ("authorization: Bearer $GAMMARAY_API_KEY" in secured) is ingress
        assert ("curl http://gammaray.example.com/v1/completions" in secured) is ingress


def test_unknown_field_is_found_in_every_kind():
    for manifest in render(EVERYTHING).values():
        check(manifest)
        manifest.get("spec", manifest)["planted"] = {}
        with pytest.raises(InvalidManifestError, match="planted"):
            check(manifest)


def test_repeated_rendering_and_the_packed_chart_give_the_same_manifests(tmp_path):
    """GitOps tools render charts repeatedly and without a cluster."""
    packed = helm_python.Chart.load(Path(chart().save(tmp_path)))
    for values in (REGISTRY, EVERYTHING):
        first = chart().render(values, name="x")
        assert chart().render(values, name="x") == packed.render(values, name="x") == first


def test_every_value_is_documented_and_none_holds_a_secret():
    """No value is named like a secret but references to Secrets, which are a name and a key."""
    sys.path.insert(0, str(ROOT / "helm"))
    try:
        from values_doc import read_values
    finally:
        sys.path.remove(str(ROOT / "helm"))
    readme = (CHART / "README.md").read_text()
    for value in read_values(CHART / "values.yaml"):
        assert value.is_section or f"| `{'.'.join(value.path)}` |" in readme
        secret = re.search(r"(?i)password|token|secret|api_?key|credential", value.path[-1])
        if value.is_section or not secret:
            continue
        is_reference = isinstance(value.default, dict) and value.default.keys() == {"name", "key"}
        is_name = value.path[-1] in ("secretName", "pullSecrets", "orchestratorSecret", "workerSecret")
        assert is_reference or is_name, value.path
        assert not is_reference or value.default["name"] == ""


DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = jsonschema.Draft7Validator(yaml.safe_load((CHART / "values.schema.json").read_text()))
COUNTS = (("orchestrator", "replicas"), ("draft", "workers"), ("target", "workers"))
"""Numbers that may be given as strings."""

UNDRAFTED = {"draft": {"workers": "0"}, "pods": {"disruptionBudget": {"enabled": False}}, **CACHE}


def replaced(node, text, path=(), with_empty=False):
    """Return values with each string replaced; lists, which have the form of Kubernetes' own, stay."""
    if isinstance(node, dict):
        return {key: replaced(value, text, (*path, key), with_empty) for key, value in node.items()}
    is_string = isinstance(node, str) and path not in COUNTS and (node or with_empty)
    return text if is_string else node


def allowed(values, original):
    """Return values with the original where the schema refuses the replacement."""
    while errors := list(SCHEMA.iter_errors(values)):
        for error in errors:
            *path, last = error.absolute_path
            place, source = values, original
            for key in path:
                place, source = place[key], source[key]
            assert place[last] != source[last], error.message
            place[last] = source[last]
    return values


def kinds(node):
    """Count the kinds of scalars in a document and in the YAML documents that it holds."""
    if isinstance(node, dict):
        assert {type(key) for key in node} <= {str}, node
    if isinstance(node, dict | list):
        return sum(map(kinds, node.values() if isinstance(node, dict) else node), Counter())
    if isinstance(node, str) and ("applications:" in node or "exporters:" in node):
        return kinds(read_yaml(node))
    return Counter([type(node).__name__])


@pytest.mark.slow
@pytest.mark.parametrize("variant", [{}, EVERYTHING, UNDRAFTED], ids=["default", "everything", "no drafts"])
@pytest.mark.parametrize("with_empty", [False, True])
def test_every_string_stays_a_string(variant, with_empty):
    original, plain = merged(DEFAULTS, REGISTRY, variant), {}
    for text in ("plain", "123", "true", "1e3", "on", "0x1F", "- a: b # c"):
        values = allowed(replaced(original, text, with_empty=with_empty), original)
        shown = {file: kinds(manifest) for file, manifest in render(values).items()}
        assert shown == (plain or shown) != {}, text
        plain = shown
        if text != "plain":
            check_release(values)


def test_names_of_release_and_namespace_stay_strings_and_whole_numbers_whole():
    """Templates print numbers from 1,000,000 on as 1e+06, which Kubernetes refuses for a whole number."""
    texts = chart().render({**EVERYTHING, "fullnameOverride": "g123"}, name="123", namespace="456")
    for text in (text for path, text in texts.items() if text.strip() and "NOTES" not in path):
        check(read_yaml(text))
        assert read_yaml(text)["metadata"]["labels"]["app.kubernetes.io/instance"] == "123"
    many = 2_000_000
    pod_fields = {"terminationGracePeriodSeconds": many, "securityContext": {"runAsUser": many}}
    pod_fields["probes"] = {"startup": {"failureThreshold": many}}
    cache, ray = {"download": {"timeoutSeconds": many}}, {"autoscaler": {"idleTimeoutSeconds": many}}
    found = release(merged(EVERYTHING, {"pods": pod_fields, "modelCache": cache, "ray": ray}))
    assert found["job-models"]["spec"]["activeDeadlineSeconds"] == many
    assert found["cluster"]["autoscalerOptions"]["idleTimeoutSeconds"] == many
    for role in ROLES:
        assert found["pods"][role]["terminationGracePeriodSeconds"] == many
        assert found["pods"][role]["securityContext"]["runAsUser"] == many
    assert "e+06" not in str(found)
