"""The checks of manifests find planted errors."""

import pytest

from tests.support.chart.chart_helpers import VARIANTS, groups, render
from tests.support.chart.manifest_schemas import (
    InvalidManifestError,
    check,
    check_by_kuberay,
    check_pod,
    needs_kuberay,
)


def everything():
    return render(VARIANTS["everything"])


def test_unknown_field_is_found_in_every_kind():
    for manifest in everything().values():
        check(manifest)
        manifest.get("spec", manifest)["planted"] = {}
        with pytest.raises(InvalidManifestError, match="planted"):
            check(manifest)


@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        ("service-http.yaml", lambda m: m["spec"]["ports"][0].update(port="http")),
        ("statefulset-redis.yaml", lambda m: m["spec"].pop("serviceName") and m["spec"].pop("selector")),
        ("rayservice.yaml", lambda m: m["spec"]["upgradeStrategy"].update(type="Sometimes")),
        ("rayservice.yaml", lambda m: m["metadata"]["labels"].update(number=1)),
        ("certificate-public.yaml", lambda m: m["spec"].update(dnsNames=[])),
        ("grpcroute.yaml", lambda m: m["spec"].update(parentRefs=[])),
    ],
)
def test_wrong_value_is_found(file, spoil):
    manifest = everything()[file]
    spoil(manifest)
    with pytest.raises(InvalidManifestError):
        check(manifest)


@pytest.mark.parametrize(
    ("version", "kind"),
    [("v1", "Pot"), ("ray.io/v1", "RayServise"), ("example.com/v1", "Thing"), (None, None)],
)
def test_unknown_kind_is_refused(version, kind):
    with pytest.raises(InvalidManifestError):
        check({"apiVersion": version, "kind": kind, "metadata": {"name": "x"}})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec["containers"][0]["readinessProbe"].update(grcp={}),
        lambda spec: spec.update(terminationGracePeriodSeconds="60"),
        lambda spec: spec.pop("containers"),
    ],
)
def test_wrong_pod_is_found(spoil):
    template = groups()["draft"]["template"]
    check_pod(template)
    spoil(template["spec"])
    with pytest.raises(InvalidManifestError):
        check_pod(template)


@needs_kuberay
@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec.update(serveConfigV3=""),
        lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].pop("groupName"),
        lambda spec: spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"].update(containerz=[]),
    ],
)
def test_kuberays_schema_finds_planted_errors(spoil):
    manifest = everything()["rayservice.yaml"]
    check_by_kuberay(manifest)
    spoil(manifest["spec"])
    with pytest.raises(InvalidManifestError):
        check_by_kuberay(manifest)
