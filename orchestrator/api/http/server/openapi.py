"""The OpenAPI document of the HTTP API, at `GET /openapi.json`.

Also printed by `python -m orchestrator.api.http.server.openapi`.

Schemas are generated from the models that parse requests and from the types of responses.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, get_args

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import TypedDictSchema

from gammaray import __version__
from gammaray.checks import Integer
from gammaray.wire.metadata import MAX_TIMEOUT_MS, TIMEOUT_HEADER
from orchestrator.access.caller import MAX_PRIORITY, PRIORITY_HEADER
from orchestrator.api.http import models, response_types
from orchestrator.api.http.auth import DOCUMENT_PATH
from orchestrator.api.http.errors import STATUSES
from orchestrator.api.http.responses_api import types
from orchestrator.api.http.responses_api.models import INCLUDABLE, ResponsesRequest
from orchestrator.api.http.responses_api.records import MAX_LISTED, MAX_SEQUENCE_NUMBER

_INFO = {
    "title": "gammaray",
    "version": __version__,
    "description": "Lossless speculative decoding, over OpenAI's API.",
    "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
}
_BODIES: tuple[Any, ...] = (
    *(ResponsesRequest, *get_args(types.Event), types.ResponseObject, types.ItemList, types.DeletedResponse),
    *(models.CompletionRequest, models.ChatRequest, response_types.Error),
    *(response_types.Completion, response_types.CompletionPiece),
    *(response_types.ChatCompletion, response_types.ChatCompletionPiece),
    *(response_types.ModelList, response_types.MetricsTarget, response_types.Health, response_types.Root),
)
_JSON, _TEXT = "application/json", {"type": "string"}
_EVENT_ID = {**_TEXT, "pattern": r"^[A-Za-z0-9_.-]{1,128}:[0-9]{1,12}:[0-9]{1,12}(:end)?$"}
_TIMEOUT, _PRIORITY = Integer(1, MAX_TIMEOUT_MS).schema, Integer(-MAX_PRIORITY, MAX_PRIORITY).schema
_HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    TIMEOUT_HEADER: (_TIMEOUT, "Timeout of the request in milliseconds; then the work is cancelled."),
    PRIORITY_HEADER: (_PRIORITY, "Priority among the tenant's waiting requests; higher runs first."),
    "Last-Event-ID": (_EVENT_ID, "Id of the last event received, to resume a stream of one choice."),
    "traceparent": (_TEXT, "W3C trace context; invalid values are ignored."),
}
_SECONDS = {"type": "integer", "minimum": 1}
_LOOKING_UP = (400, 401, 403, 405, 500, 503, 504)


class _Schemas(GenerateJsonSchema):
    """Pydantic's schemas, without titles of fields, and closed for responses."""

    def typed_dict_schema(self, schema: TypedDictSchema) -> dict[str, Any]:
        return {**super().typed_dict_schema(schema), "additionalProperties": False}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@cache
def document() -> dict[str, Any]:
    """Return the document."""
    _, schemas = TypeAdapter.json_schemas(
        [(body, "validation", TypeAdapter(body)) for body in _BODIES],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Schemas,
    )
    return {
        "openapi": "3.1.0",
        "info": _INFO,
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/completions": {"post": _generation("CompletionRequest", "Completion")},
            "/v1/chat/completions": {"post": _generation("ChatRequest", "ChatCompletion")},
            **_responses(),
            **{path: {"get": operation} for path, operation in _information().items()},
        },
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(schema: str | dict[str, Any], kind: str = _JSON) -> dict[str, Any]:
    return {kind: {"schema": _ref(schema) if isinstance(schema, str) else schema}}


def _operation(
    name: str, meaning: str, content: dict[str, Any], errors: tuple[int, ...] = _LOOKING_UP, **more: Any
) -> dict[str, Any]:
    """Return an operation that answers with `content` or an error; without 401 it needs no key."""
    answers: dict[str, Any] = {"200": {"description": meaning, "content": content}}
    for status in sorted(errors):
        answers[str(status)] = {"description": STATUSES[status], "content": _content("Error")}
        if status in (429, 503):
            answers[str(status)]["headers"] = {"Retry-After": {"required": True, "schema": _SECONDS}}
    public: dict[str, Any] = {} if 401 in errors else {"security": [{}]}
    return {"operationId": name, **public, **more, "responses": answers}


def _generation(request: str, response: str) -> dict[str, Any]:
    """Return the operation of a kind of completions."""
    piece = {"anyOf": [_ref(f"{response}Piece"), _ref("Error")]}
    data = {"anyOf": [{"const": "[DONE]"}, {**_TEXT, "contentMediaType": _JSON, "contentSchema": piece}]}
    # Tools expect the schema of one event for this media type.
    event = {"type": "object", "properties": {"id": _TEXT, "data": data}, "required": ["data"]}
    return _operation(
        f"create{response}",
        "The completion; with `stream` its pieces, as server-sent events.",
        _content(response) | _content(event, "text/event-stream"),
        tuple(STATUSES),
        parameters=_header_parameters(),
        requestBody={"required": True, "content": _content(request)},
    )


def _responses() -> dict[str, dict[str, Any]]:
    """Return the operations of the Responses API by path and method."""
    response_id = {"name": "response_id", "in": "path", "required": True, "schema": _TEXT}
    include = {"type": "array", "items": {"enum": list(INCLUDABLE)}}
    index = {"type": "integer", "minimum": 0, "maximum": MAX_SEQUENCE_NUMBER}
    streamed = _content(_ref("ResponseObject")) | _content(_response_event(), "text/event-stream")
    flag = {"type": "boolean", "default": False}
    errors = (*_LOOKING_UP, 404)
    headers = [header for header in _header_parameters() if header["name"] != "Last-Event-ID"]

    def query(**schemas: dict[str, Any]) -> list[dict[str, Any]]:
        given = [{"name": name, "in": "query", "schema": schema} for name, schema in schemas.items()]
        return [response_id, *given]

    return {
        "/v1/responses": {
            "post": _operation(
                "createResponse",
                "The response; with `stream` its events, as server-sent events.",
                streamed,
                tuple(STATUSES),
                parameters=headers,
                requestBody={"required": True, "content": _content("ResponsesRequest")},
            )
        },
        "/v1/responses/{response_id}": {
            "get": _operation(
                "getResponse",
                "A stored response; with `stream` its events after number `starting_after`.",
                streamed,
                (*errors, 409),
                parameters=query(
                    stream=flag, starting_after=index, include_obfuscation=flag, include=include
                ),
            ),
            "delete": _operation(
                "deleteResponse",
                "The response and its session are deleted.",
                _content("DeletedResponse"),
                errors,
                parameters=[response_id],
            ),
        },
        "/v1/responses/{response_id}/cancel": {
            "post": _operation(
                "cancelResponse",
                "Never: only responses with `background` can be cancelled.",
                _content("ResponseObject"),
                errors,
                parameters=[response_id],
            )
        },
        "/v1/responses/{response_id}/input_items": {
            "get": _operation(
                "listInputItems",
                "The items before the response's output, those of earlier responses included.",
                _content("ItemList"),
                errors,
                parameters=query(
                    limit={"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": 20},
                    order={"enum": ["asc", "desc"], "default": "desc"},
                    after=_TEXT,
                    include=include,
                ),
            )
        },
    }


def _response_event() -> dict[str, Any]:
    """Return the schema of an event of a response's stream."""
    names = [event.__name__ for event in get_args(types.Event)]
    events = {"anyOf": [_ref(name) for name in names]}
    data = {**_TEXT, "contentMediaType": _JSON, "contentSchema": events}
    return {"type": "object", "properties": {"event": _TEXT, "data": data}, "required": ["event", "data"]}


def _header_parameters() -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "description": meaning, "schema": schema}
        for name, (schema, meaning) in _HEADERS.items()
    ]


def _information() -> dict[str, dict[str, Any]]:
    """Return the other operations by path."""
    name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    targets = _content({"type": "array", "items": _ref("MetricsTarget")})
    metrics = "vLLM's metrics about requests and speculation, in Prometheus's text format."
    root = _content("Root") | _content(_TEXT, "text/html")
    one: dict[str, Any] = {"errors": (*_LOOKING_UP, 404), "parameters": [name]}
    return {
        "/v1/models": _operation("listModels", "The served models.", _content("ModelList")),
        "/v1/models/{name}": _operation("getModel", "The served model.", _content("Model"), **one),
        "/metrics": _operation("scrapeMetrics", metrics, _content(_TEXT, "text/plain")),
        "/metrics/targets": _operation("listMetricsTargets", "Processes that serve metrics.", targets),
        "/health": _operation("health", "A target worker is available.", _content("Health"), (403, 405, 503)),
        "/": _operation("root", "The server; the playground for browsers.", root, (403, 405)),
        DOCUMENT_PATH: _operation("describe", "This document.", _content({"type": "object"}), (403, 405)),
    }


if __name__ == "__main__":
    print(json.dumps(document(), indent=1))
