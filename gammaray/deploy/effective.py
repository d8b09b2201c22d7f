"""The effective settings of a cluster, for display; secrets are redacted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit, urlunsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from gammaray.config import ClusterSettings, PoolSize, ScalingSettings, at_least_one, settings_error
from gammaray.deploy.serve_config import APPLICATIONS, GRPC_SERVICERS, ServeApplication, role_settings
from gammaray.errors import InvalidArgumentError

REDACTED = "**redacted**"
_SECRET_NAME = re.compile(r"(^|_)(password|secret|token|api_keys?|private_key)$")


class _Arguments(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: dict[str, Any] = Field(description="Fields of the role's settings.")
    scaling: dict[str, Any] | None = Field(None, description="Fields of ScalingSettings; None: the defaults.")


class WorkerArguments(_Arguments):
    """Arguments of a worker pool's application in a Serve configuration."""

    workers: PoolSize = Field(
        "1", validate_default=True, description="Number of workers, N or MIN:MAX to scale between."
    )


class OrchestratorArguments(_Arguments):
    """Arguments of the orchestrator's application in a Serve configuration."""

    replicas: Annotated[PoolSize, AfterValidator(at_least_one)] = Field(
        "1", validate_default=True, description="Number of orchestrators, N or MIN:MAX to scale between."
    )


def effective_settings(cluster: ClusterSettings) -> dict[str, Any]:
    """Return the effective settings of `gammaray up`: arguments, else environment, else defaults."""
    shared = {"redis_url": cluster.redis_url} if cluster.redis_url else {}
    result = {"cluster": cluster.model_dump(mode="json")}
    for role, own in role_settings(cluster).items():
        result[role] = _settings(APPLICATIONS[role], {**own, **shared})
    shown: dict[str, Any] = redacted(result)
    return shown


def effective_of_serve(document: object) -> dict[str, Any]:
    """Return every setting of every role by a Serve configuration, as of `serve_document` and the chart.

    Raises:
        InvalidArgumentError: It is not a configuration of gammaray, or a value in it is not allowed.
    """
    config = _mapping("", document)
    known = {application.name: application for application in APPLICATIONS.values()}
    found: dict[str, Any] = {}
    for entry in config.get("applications") or []:
        name = _mapping("applications", entry).get("name")
        if name not in known:
            raise InvalidArgumentError("applications.name", name, f"one of {sorted(known)}")
        found[known[name].role] = _application(known[name], entry)
    if missing := [role for role in ("target", "orchestrator") if role not in found]:
        raise InvalidArgumentError("applications", sorted(found), f"also {' and '.join(missing)}")
    grpc = _mapping("grpc_options", config.get("grpc_options"))
    if (servicers := grpc.get("grpc_servicer_functions")) != list(GRPC_SERVICERS):
        raise InvalidArgumentError("grpc_options.grpc_servicer_functions", servicers, str(GRPC_SERVICERS))
    http = _mapping("http_options", config.get("http_options"))
    shown: dict[str, Any] = redacted({"http_port": http.get("port"), "grpc_port": grpc.get("port"), **found})
    return shown


def redacted(value: Any, name: str = "") -> Any:
    """Return a copy with secrets redacted: passwords in URLs, and fields whose names mark them as secret."""
    if isinstance(value, Mapping):
        return {key: redacted(entry, str(key)) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(entry, name) for entry in value]
    if isinstance(value, str) and value:
        return REDACTED if _SECRET_NAME.search(name) else _without_password(value)
    return value


def _application(application: ServeApplication, entry: Mapping[str, Any]) -> dict[str, Any]:
    where = f"applications.{application.name}"
    for field in ("import_path", "route_prefix"):
        if entry.get(field) != (allowed := getattr(application, field)):
            raise InvalidArgumentError(f"{where}.{field}", entry.get(field), repr(allowed))
    deployments = entry.get("deployments") or []
    for deployment in deployments:
        if (name := _mapping(where, deployment).get("name")) != application.deployment:
            raise InvalidArgumentError(f"{where}.deployments.name", name, repr(application.deployment))
    args = _mapping(f"{where}.args", entry.get("args"))
    of_node = [deployment.get("ray_actor_options", {}) for deployment in deployments]
    result = {"takes": of_node[0] if of_node else {}}
    try:
        given: _Arguments
        if application.role == "orchestrator":
            given = orchestrators = OrchestratorArguments(**args)
            size = orchestrators.replicas
            number = {"replicas": str(size) if size.is_elastic else size.minimum}
        else:
            given = workers = WorkerArguments(**args)
            size = workers.workers
            number = {"workers": str(size)}
        if size.is_elastic:
            result["scaling"] = ScalingSettings(**(given.scaling or {})).model_dump(mode="json")
        return {**number, **result, "settings": _settings(application, given.settings)}
    except ValidationError as error:
        raise settings_error(error, where=where, show=redacted) from None


def _settings(application: ServeApplication, given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        settings = application.settings(**given)
    except ValidationError as error:
        raise settings_error(error, application.settings, application.role, redacted) from None
    return settings.model_dump(mode="json")


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(name or "document", value, "a mapping")
    return value


def _without_password(text: str) -> str:
    text = re.sub(r"([?&]\w*password=)[^&]*", rf"\1{REDACTED}", text)
    try:
        parts = urlsplit(text)
        password = parts.password
    except ValueError:
        return text
    if not password:
        return text
    login, _, place = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{login.partition(':')[0]}:{REDACTED}@{place}"))
