"""Checks of answers against the OpenAPI document."""

import json
from functools import cache

from jsonschema import Draft202012Validator

from orchestrator.api.http.server.app import create_app
from orchestrator.api.http.server.openapi import document as document_of
from tests.support.surface_helpers import ScriptedBackend


@cache
def document() -> dict:
    """Return the document of the API."""
    return document_of(create_app(ScriptedBackend()))


def request_schema(path):
    """Return the schema of the bodies that are posted to a path."""
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
