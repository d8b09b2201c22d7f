"""Builds the JSON schema of the chart's values from values.yaml and the settings classes of the package."""

from __future__ import annotations

from typing import Any

from values_doc import Value

from gammaray.config import DraftSettings, OrchestratorSettings, ScalingSettings, TargetSettings

SETTINGS = (OrchestratorSettings, DraftSettings, TargetSettings, ScalingSettings)
ROLES = ("head", "orchestrator", "draft", "target")

_OF_ALL_PODS = {
    *("annotations", "labels", "nodeSelector", "affinity", "tolerations", "priorityClassName"),
    *("runtimeClassName", "runAsImageUser", "securityContext", "containerSecurityContext", "patch"),
}
_OF_CLIENTS = {*_OF_ALL_PODS, "env", "volumes", "volumeMounts"}
OVERRIDES = {
    "modelCache.download": _OF_CLIENTS,
    "telemetry.collector": _OF_CLIENTS,
    "telemetry.jaeger": _OF_ALL_PODS,
    "redis": _OF_ALL_PODS,
    "redis.passwordJob": _OF_ALL_PODS,
    "helmTest": _OF_ALL_PODS,
}
"""Values of `pods` that components without Ray override; those with `env` connect to other networks."""

_OF_CHART = {
    *("model", "device", "listen", "redis_url", "redis_password", "redis_prefix"),
    *("api_keys_file", "receipt_keys_file", "metrics_listen", "tls_dir"),
}
"""Settings that the templates set; values must not contain them."""

_QUANTITY = {"pattern": "^[0-9]+([.][0-9]+)?(m|k|[KMGTPE]i|[MGTPE]|[eE][0-9]+)?$"}
_QUANTITIES = {"type": "object", "additionalProperties": {"type": ["string", "number"], **_QUANTITY}}

# Parts of an image's reference. A digest is no tag, and neither is a part of a repository.
_PLACE = "[^\\s:@/]+(:[0-9]+(/[^\\s:@/]+)+|(/[^\\s:@/]+)*)"
_IMAGE_PARTS = {
    "registry": {"pattern": "^([^\\s:@/]+(:[0-9]+)?(/[^\\s:@/]+)*/?)?$"},
    "repository": {"pattern": f"^({_PLACE})?$"},
    "tag": {"pattern": "^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$"},
    "digest": {"pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image": {"pattern": f"^{_PLACE}(:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?$"},
}

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}


def values_schema(values: list[Value]) -> dict[str, Any]:
    """Return the schema: unknown keys are rejected, except in maps defined by Kubernetes."""
    top: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {}}
    for value in values:
        parent = top
        for key in value.path[:-1]:
            parent = parent["properties"][key]
        parent["properties"][value.path[-1]] = _schema_of(value)
    pods = top["properties"]["pods"]["properties"]
    for path, names in {**{role: set(pods) for role in ROLES}, **OVERRIDES}.items():
        component = top
        for key in path.split("."):
            component = component["properties"][key]
        inherited = {name: schema for name, schema in pods.items() if name in names}
        component["properties"] = {**inherited, **component["properties"]}
    # Helm passes this key to every chart.
    top["properties"]["global"] = {"type": "object"}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the gammaray chart",
        **top,
        "$defs": {settings.__name__: _settings_schema(settings) for settings in SETTINGS},
    }


def _schema_of(value: Value) -> dict[str, Any]:
    if value.is_section:
        return {"type": "object", "additionalProperties": False, "properties": {}}
    if "$ref" in value.constraints:
        return {"description": value.text, "allOf": [value.constraints]}
    schema = {"description": value.text, "type": _TYPES[type(value.default)]}
    if value.path[-1].endswith("Secret"):
        schema |= {
            "additionalProperties": False,
            "properties": {"name": {"type": "string"}, "key": {"type": "string", "minLength": 1}},
        }
    if value.path[-1] == "resources":
        schema |= {
            "additionalProperties": False,
            "properties": {"requests": _QUANTITIES, "limits": _QUANTITIES, "claims": {"type": "array"}},
        }
    if value.path[-1].lower().endswith("size"):
        schema |= _QUANTITY
    schema |= _IMAGE_PARTS.get(value.path[-1], {})
    return schema | value.constraints


def _settings_schema(settings: type[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = settings.model_json_schema()
    properties = {name: entry for name, entry in schema["properties"].items() if name not in _OF_CHART}
    for entry in properties.values():
        entry.pop("title", None)
    return {
        "type": "object",
        "description": f"Fields of {settings.__name__} in gammaray/config.py.",
        "additionalProperties": False,
        "properties": properties,
    }
