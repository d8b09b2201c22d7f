"""Strings in the values stay strings, whatever they contain, and whole numbers stay whole."""

from collections import Counter

import jsonschema
import pytest
import yaml

from tests.support.chart.chart_helpers import (
    CHART,
    EVERYTHING,
    REGISTRY,
    chart,
    every_pod,
    merged,
    read_yaml,
    render,
)
from tests.support.chart.manifest_schemas import KUBERAY_CRD, check, check_by_kuberay, check_pod

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = jsonschema.Draft7Validator(yaml.safe_load((CHART / "values.schema.json").read_text()))
COUNTS = (("orchestrator", "replicas"), ("draft", "workers"), ("target", "workers"))
"""Numbers that may be given as strings."""

UNDRAFTED = {
    "draft": {"workers": "0"},
    "pods": {"disruptionBudget": {"enabled": False}},
}
VARIANTS = {
    "default": REGISTRY,
    "everything": EVERYTHING,
    "no drafts": merged(REGISTRY, UNDRAFTED, {"modelCache": {"enabled": True}}),
}


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
        return sum((kinds(value) for value in node.values()), Counter())
    if isinstance(node, list):
        return sum((kinds(value) for value in node), Counter())
    if isinstance(node, str) and ("applications:" in node or "exporters:" in node):
        return kinds(read_yaml(node))
    return Counter([type(node).__name__])


def given(text, variant, with_empty):
    original = merged(DEFAULTS, VARIANTS[variant])
    return allowed(replaced(original, text, with_empty=with_empty), original)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("with_empty", [False, True])
def test_every_string_stays_a_string(variant, with_empty):
    plain = {file: kinds(doc) for file, doc in render(given("plain", variant, with_empty)).items()}
    assert plain
    for text in ("123", "true", "1e3", "on", "0x1F", "- a: b # c"):
        values = given(text, variant, with_empty)
        manifests = render(values)
        assert {file: kinds(manifest) for file, manifest in manifests.items()} == plain, text
        for manifest in manifests.values():
            check(manifest)
        for template in every_pod(values).values():
            check_pod(template)
        if KUBERAY_CRD.is_file():
            check_by_kuberay(manifests["rayservice.yaml"])


def test_names_of_release_and_namespace_stay_strings():
    texts = chart().render({**EVERYTHING, "nameOverride": "123"}, name="123", namespace="456")
    manifests = [read_yaml(text) for path, text in texts.items() if text.strip() and "NOTES" not in path]
    for manifest in manifests:
        check(manifest)
    assert {manifest["metadata"]["labels"]["app.kubernetes.io/instance"] for manifest in manifests} == {"123"}


def test_whole_numbers_stay_whole():
    """Templates print numbers from 1,000,000 on as 1e+06, which Kubernetes refuses for a whole number."""
    many = 2_000_000
    values = merged(
        EVERYTHING,
        {
            "pods": {
                "terminationGracePeriodSeconds": many,
                "securityContext": {"runAsUser": many},
                "probes": {"startup": {"failureThreshold": many}},
            },
            "modelCache": {"download": {"timeoutSeconds": many}},
            "ray": {"autoscaler": {"idleTimeoutSeconds": many}},
        },
    )
    manifests = render(values)
    assert manifests["job-models.yaml"]["spec"]["activeDeadlineSeconds"] == many
    config = manifests["rayservice.yaml"]["spec"]["rayClusterConfig"]
    assert config["autoscalerOptions"]["idleTimeoutSeconds"] == many
    for group in (config["headGroupSpec"], *config["workerGroupSpecs"]):
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] == many
    for template in every_pod(values).values():
        assert template["spec"]["securityContext"]["runAsUser"] == many
    assert "e+06" not in str(manifests)
