"""Renders the chart with Helm; the variants of values that tests use."""

import copy
import functools
import json
import pickle
import re
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm" / "gammaray"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
RELEASE, NAMESPACE = "demo", "somewhere"
NAME = "demo-gammaray"
ROLES = ("head", "orchestrator", "draft", "target")
COMPONENTS: dict[str, tuple[str, ...]] = {
    **{role: (role,) for role in ROLES},
    "redis": ("redis",),
    "redis-password": ("redis", "passwordJob"),
    "models": ("modelCache", "download"),
    "test": ("helmTest",),
    "jaeger": ("telemetry", "jaeger"),
    "collector": ("telemetry", "collector"),
}
"""Every component with pods -> the key of its values."""

TWO_MODELS = {"target": "team/large", "draft": "team/small"}
ON = {"enabled": True}
CACHED: dict[str, Any] = {"modelCache": ON, "models": TWO_MODELS}
"""Models that a Job downloads for all pods."""

DIGEST = "sha256:" + "0123456789abcdef" * 4

REGISTRY: dict[str, Any] = {"image": {"registry": "registry.example.com/gammaray"}}
"""What every variant needs, since no image of gammaray is published."""

EVERYTHING: dict[str, Any] = {
    "image": {"registry": "registry.example.com/team", "tag": "1.2.3", "pullSecrets": [{"name": "registry"}]},
    "pods": {
        "annotations": {"example.com/a": "b"},
        "labels": {"example.com/team": "inference"},
        "nodeSelector": {"pool": "gpu"},
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "priorityClassName": "high",
        "env": [{"name": "EXTRA", "value": "1"}],
        "volumes": [{"name": "extra", "emptyDir": {}}],
        "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        "initContainers": [{"name": "prepare", "image": "registry.example.com/prepare:1"}],
        "sidecars": [{"name": "agent", "image": "registry.example.com/agent:1"}],
    },
    "models": TWO_MODELS,
    "orchestrator": {"settings": {"max_gamma": 6}},
    "draft": {"workers": "0:4", "acceleratorType": "NVIDIA-L4", "settings": {"draft_ahead": False}},
    "target": {"workers": "2:3", "gpus": 1, "nodeSelector": {"zone": "a"}},
    "scaling": {"draft_load": 2.5},
    "ray": {"faultTolerance": {"enabled": True}},
    "tls": {"certManager": {"enabled": True, "issuerRef": {"name": "letsencrypt"}}},
    "workerTls": {"enabled": True, "issuerRef": {"name": "internal"}},
    "ingress": {"enabled": True},
    "gateway": {"enabled": True, "className": "example", "requestTimeout": "3600s"},
    "apiKeysSecret": {"name": "keys"},
    "receiptKeysSecret": {"name": "receipts"},
    "huggingFaceTokenSecret": {"name": "hugging-face"},
    "modelCache": {"enabled": True, "storageClassName": "shared"},
    "redis": {"storageClassName": "fast"},
    "service": {"type": "LoadBalancer", "annotations": {"example.com/lb": "internal"}},
    "telemetry": {"otlpEndpoint": "http://elsewhere:4317", "jaeger": ON, "collector": ON},
    "monitoring": {
        **dict.fromkeys(("podMonitor", "serviceMonitor", "alerts", "dashboards"), True),
        "labels": {"release": "prometheus"},
    },
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"name": "clients"}}}],
        "egress": {**ON, "rules": [{"to": [{"namespaceSelector": {"matchLabels": {"name": "telemetry"}}}]}]},
    },
    "helmTest": {"apiKeySecret": {"name": "test-key"}},
    "serviceAccount": {"annotations": {"example.com/role": "reader"}},
}
"""Every optional feature on."""

NOTHING: dict[str, Any] = {
    "pods": {"topologySpread": {"enabled": False}, "disruptionBudget": {"enabled": False}},
    "draft": {"workers": "0"},
    "target": {"gpus": 0},
    "ray": {"authMode": "disabled", "upgradeStrategy": "None"},
    "redis": {"urlSecret": {"name": "redis-url"}},
    "networkPolicy": {"enabled": False},
    "serviceAccount": {"create": False},
}
"""Every optional feature off."""

VARIANTS: dict[str, dict[str, Any]] = {
    "default": REGISTRY,
    "everything": EVERYTHING,
    "nothing": {**REGISTRY, **NOTHING},
    **{path.stem: {**REGISTRY, **yaml.safe_load(path.read_text())} for path in EXAMPLES},
}


class KubernetesLoader(yaml.CSafeLoader):
    """Reads YAML like Kubernetes, to which also `1e3` is a number."""


KubernetesLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(text: str) -> Any:
    return yaml.load(text, KubernetesLoader)


@functools.cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def render_texts(values: dict[str, Any] | None = None, name: str = RELEASE) -> dict[str, str]:
    """Return the text of each template by file name, without empty ones.

    Values without an image registry get `REGISTRY`.
    """
    return dict(_render_texts(json.dumps(values or {}), name))


@functools.cache
def _render_texts(values: str, name: str) -> dict[str, str]:
    rendered = chart().render({**REGISTRY, **json.loads(values)}, name=name, namespace=NAMESPACE)
    return {Path(path).name: text for path, text in rendered.items() if text.strip()}


@functools.cache
def _render(values: str, name: str) -> bytes:
    """Return the pickled manifests: to copy them takes longer."""
    texts = _render_texts(values, name)
    return pickle.dumps({file: read_yaml(text) for file, text in texts.items() if file != "NOTES.txt"})


def render(values: dict[str, Any] | None = None, name: str = RELEASE) -> dict[str, dict[str, Any]]:
    """Return each manifest by the file name of its template; a template with two resources is an error."""
    manifests: dict[str, dict[str, Any]] = pickle.loads(_render(json.dumps(values or {}), name))
    return manifests


def cluster(values: dict[str, Any] | None = None) -> dict[str, Any]:
    config: dict[str, Any] = render(values)["rayservice.yaml"]["spec"]["rayClusterConfig"]
    return config


def groups(values: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    config = cluster(values)
    workers = {group["groupName"]: group for group in config["workerGroupSpecs"]}
    return {"head": config["headGroupSpec"], **workers}


def passing_pods(values: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return the pods of Jobs and tests, by component."""
    manifests = render(values).values()
    found = [manifest["spec"]["template"] for manifest in manifests if manifest["kind"] == "Job"]
    found += [manifest for manifest in manifests if manifest["kind"] == "Pod"]
    return {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod for pod in found}


def pods(values: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return the template of each kind of long-running pod of the release, by component."""
    found = {role: group["template"] for role, group in groups(values).items()}
    for manifest in render(values).values():
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            template = manifest["spec"]["template"]
            found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
    return found


def every_pod(values: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    return {**pods(values), **passing_pods(values)}


def release(values: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return manifests by file stem and, by component, groups, pods, containers, variables and arguments."""
    manifests, found = render(values), every_pod(values)
    roles = {"gammaray": "orchestrator", "gammaray-draft": "draft", "gammaray-target": "target"}
    collector = manifests.get("configmap-collector.yaml", {"data": {"collector.yaml": ""}})
    return {
        **{file.removesuffix(".yaml"): manifest for file, manifest in manifests.items()},
        "cluster": cluster(values),
        "groups": groups(values),
        "pods": {name: template["spec"] for name, template in found.items()},
        "containers": {name: container(template) for name, template in found.items()},
        "env": {name: environment(template) for name, template in found.items()},
        "args": {roles[entry["name"]]: entry["args"] for entry in serve_config(values)["applications"]},
        "collector": yaml.safe_load(collector["data"]["collector.yaml"]),
    }


def at(node: Any, path: str) -> Any:
    """Return what keys, indices and names lead to; None if they lead to nothing."""
    for key in path.split():
        if isinstance(node, list):
            node = node[int(key)] if key.isdigit() else {entry["name"]: entry for entry in node}.get(key)
        else:
            node = (node or {}).get(key)
    return node


def of_component(component: str, values: dict[str, Any]) -> dict[str, Any]:
    for key in reversed(COMPONENTS[component]):
        values = {key: values}
    return values


def container(template: dict[str, Any]) -> dict[str, Any]:
    """Return the chart's own container of a pod: the first one, which KubeRay treats as Ray's."""
    first: dict[str, Any] = template["spec"]["containers"][0]
    return first


def environment(template: dict[str, Any]) -> dict[str, Any]:
    return {
        entry["name"]: entry.get("value", entry.get("valueFrom"))
        for entry in container(template).get("env", [])
    }


def serve_config(values: dict[str, Any] | None = None) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(render(values)["rayservice.yaml"]["spec"]["serveConfigV2"])
    return config


def application(role: str, values: dict[str, Any] | None = None) -> dict[str, Any]:
    name = "gammaray" if role == "orchestrator" else f"gammaray-{role}"
    (found,) = [entry for entry in serve_config(values)["applications"] if entry["name"] == name]
    return found


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            is_map = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if is_map else value
    return copy.deepcopy(result)
