"""Every manifest of every variant: lint, schemas, names, references, left-overs; values are documented."""

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
    COMPONENTS,
    DIGEST,
    EVERYTHING,
    NAME,
    NAMESPACE,
    REGISTRY,
    RELEASE,
    ROLES,
    ROOT,
    VARIANTS,
    application,
    at,
    chart,
    container,
    every_pod,
    merged,
    of_component,
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


@pytest.mark.slow
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
@pytest.mark.nightly
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


def test_extra_objects_are_templates_given_as_maps_or_text():
    name = '{{ include "gammaray.fullname" . }}-extra'
    as_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"key": "1e3"}}
    as_text = f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\ndata: {{key: '1e3'}}\n"
    for extra in (as_map, as_text):
        manifest = render({"extraObjects": [extra]})["extra-objects.yaml"]
        assert manifest == {**as_map, "metadata": {"name": f"{NAME}-extra"}}
    both = render_texts({"extraObjects": [as_map, as_text]})["extra-objects.yaml"]
    assert [entry["kind"] for entry in yaml.safe_load_all(both)] == ["ConfigMap"] * 2


def test_versions_of_images_are_in_the_values_alone_and_the_docs_list_every_image_of_a_release():
    page = (ROOT / "docs" / "install.md").read_text()
    (pattern,) = re.findall(r"helm template .* grep -o '(.*?)'", page)
    for values in VARIANTS.values():
        texts = "\n".join(text for name, text in render_texts(values).items() if name != "NOTES.txt")
        listed = {line.removeprefix(" image: ").strip('"') for line in re.findall(pattern, texts)}
        specs = [pod["spec"] for pod in every_pod(values).values()]
        entries = (one for spec in specs for one in (*spec["containers"], *spec.get("initContainers", [])))
        assert listed == {entry["image"] for entry in entries}
    tagged = re.compile(r"[a-z]/?[a-z-]+:v?\d+[.]\d+")
    for path in (CHART / "templates").iterdir():
        assert not tagged.search(path.read_text()), path
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    version = re.search(r"instead of the chart's \((.*?)\)", page)[1]
    assert defaults["redis"]["image"].startswith(f"redis:{version}.")
    for component in ("redis", "jaeger", "collector"):
        path = (*COMPONENTS[component], "image")
        assert f"`{'.'.join(path)}`" in page
        name = at(defaults, " ".join(path)).partition(":")[0]
        values = of_component(component, {"image": f"{name}@{DIGEST}"})
        chart().validate_schema(values)
        assert DIGEST in str(every_pod(merged(EVERYTHING, values)))
