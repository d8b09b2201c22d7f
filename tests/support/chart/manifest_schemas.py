"""Checks manifests against schemas, strictly: unknown fields and kinds without a schema are errors.

Kubernetes' own kinds come from the `kubernetes-validate` package. Those of operators are checked against the
small schemas in schemas/, which allow what the chart uses, and RayService also against KubeRay's own where
if there is one (../shared/kuberay next to this repository, or the file that KUBERAY_CRD_FILE names).
"""

import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator
from kubernetes_validate import utils as schemas
from referencing import Registry, Resource

from tests.support.chart.chart_helpers import ROOT, every_pod, render

KUBERNETES_VERSIONS = ("1.27", "1.37")
"""The oldest that the chart allows, and the newest with schemas."""

SCHEMAS = Path(__file__).parent / "schemas"
KUBERAY_CRD = Path(
    os.environ.get("KUBERAY_CRD_FILE") or ROOT.parent / "shared" / "kuberay" / "ray.io_rayservices.yaml"
)

needs_kuberay = pytest.mark.skipif(
    not KUBERAY_CRD.is_file(),
    reason=f"KubeRay's {KUBERAY_CRD.name} is not there; to enable: KUBERAY_CRD_FILE=FILE make test",
)


class InvalidManifestError(Exception):
    """A manifest does not fit its schema, or there is none."""


def check(manifest: dict[str, Any]) -> None:
    """Check one manifest; InvalidManifestError says where it is wrong, and why."""
    version, kind = manifest.get("apiVersion"), manifest.get("kind")
    if not version or not kind:
        raise InvalidManifestError(f"no manifest: {sorted(manifest)}")
    if own := _own_validator(f"{version}/{kind}"):
        _check_by(own, manifest)
        # Names and labels of operators' kinds follow the rules of all others.
        check({"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest["metadata"]})
        return
    for release in KUBERNETES_VERSIONS:
        try:
            validator = _kubernetes_validator(release, version, kind)
        except FileNotFoundError:
            raise InvalidManifestError(f"Kubernetes {release}: no kind {kind} in {version}") from None
        _check_by(validator, manifest)


def check_release(values: dict[str, Any]) -> None:
    """Check all manifests and pods of a release, by KubeRay's schema too where it is there."""
    for manifest in render(values).values():
        check(manifest)
    for template in every_pod(values).values():  # which the schemas of other kinds may take as it comes
        metadata = {"name": "pod", **template["metadata"]}
        check({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    if KUBERAY_CRD.is_file():
        check_by_kuberay(render(values)["rayservice.yaml"])


def check_by_kuberay(manifest: dict[str, Any]) -> None:
    _check_by(_kuberay_validator(), manifest)


def _check_by(validator: Validator, manifest: dict[str, Any]) -> None:
    errors = sorted(validator.iter_errors(manifest), key=str)
    if errors:
        raise InvalidManifestError("; ".join(f"{error.json_path}: {error.message}" for error in errors))


@functools.cache
def _own_validator(kind: str) -> Validator | None:
    path = SCHEMAS / f"{kind.replace('/', '_')}.yaml"
    return Draft202012Validator(yaml.safe_load(path.read_text())) if path.is_file() else None


@functools.cache
def _kubernetes_validator(release: str, version: str, kind: str) -> Validator:
    """Return the validator of a kind; `kubernetes_validate.validate` reads all schemas each time."""
    name = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", version)
    schema = _kubernetes_schema(release, f"{kind.lower()}-{name}")
    definitions = Resource.from_contents(_kubernetes_schema(release, "_definitions"))
    return Draft202012Validator(schema, registry=definitions @ Registry())


@functools.cache
def _kubernetes_schema(release: str, name: str) -> Any:
    (folder,) = {found for found in schemas.all_versions() if schemas.major_minor(found) == release}
    path = f"kubernetes-json-schema/v{folder}-local-strict/{name}.json"
    return schemas.schema_contents(path, release)


@functools.cache
def _kuberay_validator() -> Validator:
    crd = yaml.load(KUBERAY_CRD.read_text(), yaml.CSafeLoader)
    (version,) = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    return Draft202012Validator(_strict(schema))


def _strict(schema: Any) -> Any:
    """Refuse fields that a schema does not know, as an API server with strict validation does."""
    if isinstance(schema, dict):
        result = {key: _strict(value) for key, value in schema.items()}
        is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
        if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
        return result
    return [_strict(entry) for entry in schema] if isinstance(schema, list) else schema
