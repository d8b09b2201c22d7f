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
        ("service-http.yaml", lambda m: m.update(kind="Servise")),
        ("statefulset-redis.yaml", lambda m: m["spec"].pop("serviceName") and m["spec"].pop("selector")),
        ("rayservice.yaml", lambda m: m["spec"]["upgradeStrategy"].update(type="Sometimes")),
        ("rayservice.yaml", lambda m: m["metadata"]["labels"].update(number=1)),
        ("rayservice.yaml", lambda m: m.update(kind="RayServise")),
        ("certificate-public.yaml", lambda m: m["spec"].update(dnsNames=[])),
        ("grpcroute.yaml", lambda m: m["spec"].update(parentRefs=[])),
        ("grpcroute.yaml", lambda m: m.update(apiVersion=None, kind=None)),
    ],
)
def test_wrong_value_or_kind_is_found(file, spoil):
    manifest = everything()[file]
    spoil(manifest)
    with pytest.raises(InvalidManifestError):
        check(manifest)


def test_wrong_pod_is_found():
    for spoil in (
        lambda spec: spec["containers"][0]["readinessProbe"].update(grcp={}),
        lambda spec: spec.update(terminationGracePeriodSeconds="60"),
    ):
        template = groups()["draft"]["template"]
        check_pod(template)
        spoil(template["spec"])
        with pytest.raises(InvalidManifestError):
            check_pod(template)


@needs_kuberay
def test_kuberays_schema_finds_a_planted_error():
    manifest = everything()["rayservice.yaml"]
    check_by_kuberay(manifest)
    manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containerz"] = []
    with pytest.raises(InvalidManifestError):
        check_by_kuberay(manifest)
