"""What routes tell the OpenAPI document that FastAPI cannot know: bodies, answers, errors and headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import fastapi

from gammaray.checks import Integer
from gammaray.wire.metadata import MAX_TIMEOUT_MS, TIMEOUT_HEADER
from orchestrator.access.caller import MAX_PRIORITY, PRIORITY_HEADER
from orchestrator.api.http.errors import STATUSES

JSON, EVENTS, TEXT = "application/json", "text/event-stream", {"type": "string"}

LOOKING_UP = (400, 401, 403, 405, 500, 503, 504)
"""Statuses of failed requests that look something up."""

_EVENT_ID = {**TEXT, "pattern": r"^[A-Za-z0-9_.-]{1,128}:[0-9]{1,12}:[0-9]{1,12}(:end)?$"}
_TIMEOUT, _PRIORITY = Integer(1, MAX_TIMEOUT_MS).schema, Integer(-MAX_PRIORITY, MAX_PRIORITY).schema
_HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    TIMEOUT_HEADER: (_TIMEOUT, "Timeout of the request in milliseconds; then the work is cancelled."),
    PRIORITY_HEADER: (_PRIORITY, "Priority among the tenant's waiting requests; higher runs first."),
    "traceparent": (TEXT, "W3C trace context; invalid values are ignored."),
    "Last-Event-ID": (_EVENT_ID, "Id of the last event received, to resume a stream of one choice."),
}
_RETRY_AFTER = {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}}


def component(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def route(
    name: str,
    meaning: str,
    content: Mapping[str, Any],
    errors: Sequence[int] = LOOKING_UP,
    body: str = "",
    *,
    is_resumable: bool = False,
) -> dict[str, Any]:
    """Return the arguments of a route; one whose requests never fail with 401 needs no key.

    `content` has the schema of an answer, or the name of its component, by content type; `body` is the
    component of the request's body, if it has one.
    """
    answers: dict[int, dict[str, Any]] = {200: {"description": meaning, "content": _content(content)}}
    for status in sorted(errors):
        answers[status] = {"description": STATUSES[status], "content": _content({JSON: "Error"})}
        if status in (429, 503):
            answers[status]["headers"] = _RETRY_AFTER
    more: dict[str, Any] = {} if 401 in errors else {"security": [{}]}
    if body:
        more["parameters"] = [
            {"name": header, "in": "header", "schema": schema, "description": text}
            for header, (schema, text) in _HEADERS.items()
            if is_resumable or schema is not _EVENT_ID
        ]
        more["requestBody"] = {"required": True, "content": _content({JSON: body})}
    return {
        "operation_id": name,
        "responses": answers,
        "response_class": fastapi.Response,
        "response_model": None,
        "openapi_extra": more,
    }


def event_schema(names: Sequence[str], *, is_named: bool = False, end: str = "") -> dict[str, Any]:
    """Return the schema of a stream's event: one of the named components or, at the end, `end`."""
    data: dict[str, Any] = {
        **TEXT,
        "contentMediaType": JSON,
        "contentSchema": {"anyOf": [*map(component, names)]},
    }
    if end:
        data = {"anyOf": [{"const": end}, data]}
    fields = {"event": TEXT} if is_named else {"id": TEXT}
    # Tools expect the schema of one event for this media type.
    required = ["event", "data"] if is_named else ["data"]
    return {"type": "object", "properties": {**fields, "data": data}, "required": required}


def _content(schemas: Mapping[str, Any]) -> dict[str, Any]:
    return {
        kind: {"schema": component(one) if isinstance(one, str) else one} for kind, one in schemas.items()
    }
