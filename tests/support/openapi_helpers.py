"""Checks of answers against the OpenAPI document."""

import json
import time
from functools import cache

from jsonschema import Draft202012Validator

from orchestrator.api.http.server.app import create_app
from orchestrator.api.http.server.openapi import document as document_of
from tests.support.http_helpers import call
from tests.support.surface_helpers import ScriptedBackend


@cache
def document() -> dict:
    return document_of(create_app(ScriptedBackend()))


def request_schema(path):
    return document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def resolved(schema):
    """Return what a reference in the document leads to, or the schema itself."""
    while "$ref" in schema:
        schema = document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def validator(schema) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": {"schemas": document()["components"]["schemas"]}})


def check_answer(path, answer):
    content = document()["paths"][path]["post"]["responses"]["200"]["content"]
    validator(content["application/json"]["schema"]).validate(answer)


def check_events(path, events):
    """Check the data of a stream's events, without the last one."""
    content = document()["paths"][path]["post"]["responses"]["200"]["content"]
    _, piece = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
    for event in events:
        validator(piece["contentSchema"]).validate(json.loads(event))


async def check_refused(path, body, param, is_documented=True):
    """Post a body, JSON or bytes: the error names the field soon, and the document forbids it, if it can.

    Whether it does is not looked at if `is_documented` is None: with a large body that takes minutes.
    """
    backend, began = ScriptedBackend(), time.process_time()
    content = body if isinstance(body, bytes) else json.dumps(body)
    answer = await call(backend, path=path, content=content, headers={"Content-Type": "application/json"})
    assert time.process_time() - began < 5
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(f"{param}: got ")
    assert "allowed: " in error["message"]
    assert len(error["message"]) < 500
    assert (backend.requests, backend.num_open) == ([], 0)
    if is_documented is not None:
        assert validator(request_schema(path)).is_valid(body) is not is_documented
