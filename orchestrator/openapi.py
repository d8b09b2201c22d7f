"""The OpenAPI document of the HTTP API: `GET /openapi.json`, or `python -m orchestrator.openapi`."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from gammaray import __version__
from gammaray.wire.metadata import MAX_TIMEOUT_MS, TIMEOUT_HEADER
from orchestrator.access.caller import MAX_PRIORITY, PRIORITY_HEADER
from orchestrator.openapi_requests import REQUEST_SCHEMAS, Schema
from orchestrator.openapi_responses import RESPONSE_SCHEMAS, STREAM_SCHEMAS

__all__ = ["PATH", "add_document", "document"]

PATH = "/openapi.json"

_ERRORS = {
    400: "A field is wrong (`param` names it), malformed JSON, invalid UTF-8.",
    401: "No valid API key.",
    403: "Without API keys: a request for another host, or of a page of another site.",
    404: "Another model, or no such session.",
    405: "Another method than this path has.",
    408: "The body took too long to come.",
    409: "The session's state forbids it, or its target model is not served any more.",
    413: "The body is too long.",
    415: "The body's content type is not application/json.",
    429: "Over a limit.",
    500: "A bug of ours.",
    503: "No target worker, or no Redis; try again.",
    504: "It took longer than allowed.",
}
_LOOKING_UP = (400, 401, 403, 405, 500, 503, 504)
_GENERATING = tuple(_ERRORS)


def add_document(app: FastAPI) -> None:
    """Add GET /openapi.json."""

    @app.get(PATH)
    async def openapi() -> JSONResponse:
        return JSONResponse(document())


@cache
def document() -> dict[str, Any]:
    """Return the document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gammaray",
            "version": __version__,
            "description": "Lossless speculative decoding, over OpenAI's API.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/completions": _generation("CompletionRequest", "Completion"),
            "/v1/chat/completions": _generation("ChatRequest", "ChatCompletion"),
            **_information(),
        },
        "components": {
            "schemas": {**REQUEST_SCHEMAS, **RESPONSE_SCHEMAS, **STREAM_SCHEMAS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _generation(request: str, response: str) -> Schema:
    """Return the path of a kind of completions."""
    body = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    told = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(f"{response}Piece"), _ref("Error")]},
    }
    event = {  # each event as an object, as tools read this media type
        "type": "object",
        "properties": {"id": {"type": "string"}, "data": {"anyOf": [{"const": "[DONE]"}, told]}},
        "required": ["data"],
    }
    answer = {
        "description": "The completion; with `stream` its pieces, as server-sent events.",
        "content": {"application/json": {"schema": _ref(response)}, "text/event-stream": {"schema": event}},
    }
    return {
        "post": {
            "operationId": f"create{response}",
            "parameters": _headers(),
            "requestBody": body,
            "responses": {"200": answer, **_errors(_GENERATING)},
        }
    }


def _headers() -> list[Schema]:
    def header(name: str, schema: Schema, meaning: str) -> Schema:
        return {"name": name, "in": "header", "description": meaning, "schema": schema}

    return [
        header(
            TIMEOUT_HEADER,
            {"type": "integer", "minimum": 1, "maximum": MAX_TIMEOUT_MS},
            "Milliseconds after which nobody waits for the answer; what runs then is ended.",
        ),
        header(
            PRIORITY_HEADER,
            {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
            "Among the caller's own waiting requests; higher goes first.",
        ),
        header(
            "Last-Event-ID",
            {"type": "string", "pattern": r"^[A-Za-z0-9_.-]{1,128}:[0-9]{1,12}:[0-9]{1,12}(:end)?$"},
            "The last event that the client has of a stream of one choice: the rest follows.",
        ),
        header("traceparent", {"type": "string"}, "W3C trace context; what is none is ignored."),
    ]


def _information() -> dict[str, Schema]:
    def get(operation: str, response: str, *errors: int, **more: Any) -> Schema:
        answer = {"description": response, "content": {"application/json": {"schema": _ref(response)}}}
        responses = {"200": answer, **_errors(errors)}
        return {"get": {"operationId": operation, **more, "responses": responses}}

    name: Schema = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    everybody: Schema = {"security": [{}]}
    root = get("root", "Root", 403, 405, **everybody)
    root["get"]["responses"]["200"]["content"]["text/html"] = {"schema": {"type": "string"}}
    scraped: Schema = {
        "operationId": "scrapeMetrics",
        "responses": {
            "200": {
                "description": "vLLM's metrics about requests and speculation, in Prometheus's text format.",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            },
            **_errors(_LOOKING_UP),
        },
    }
    itself = {
        "description": "This document.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
    return {
        "/v1/models": get("listModels", "ModelList", *_LOOKING_UP),
        "/v1/models/{name}": get("getModel", "Model", *_LOOKING_UP, 404, parameters=[name]),
        "/metrics": {"get": scraped},
        "/metrics/targets": get("listMetricsTargets", "MetricsTargets", *_LOOKING_UP),
        "/health": get("health", "Health", 403, 405, 503, **everybody),
        "/": root,
        PATH: {
            "get": {
                "operationId": "describe",
                **everybody,
                "responses": {"200": itself, **_errors((403, 405))},
            }
        },
    }


def _errors(statuses: tuple[int, ...]) -> dict[str, Schema]:
    found = {}
    for status in sorted(statuses):
        answer: Schema = {"description": _ERRORS[status]}
        answer["content"] = {"application/json": {"schema": _ref("Error")}}
        if status in (429, 503):
            seconds = {"type": "integer", "minimum": 1}
            answer["headers"] = {"Retry-After": {"required": True, "schema": seconds}}
        found[str(status)] = answer
    return found


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


if __name__ == "__main__":
    print(json.dumps(document(), indent=1))
