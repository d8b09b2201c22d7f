"""The OpenAPI document at `GET /openapi.json`: FastAPI's, with the schemas of bodies and answers."""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import Any, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import TypedDictSchema
from starlette.routing import BaseRoute

from orchestrator.api.http import models, response_types
from orchestrator.api.http.responses_api import types
from orchestrator.api.http.responses_api.models import ResponsesRequest

_COMPONENTS: tuple[Any, ...] = (
    *(ResponsesRequest, *get_args(types.Event), types.ResponseObject, types.ItemList, types.DeletedResponse),
    *(models.CompletionRequest, models.ChatRequest, response_types.Error),
    *(response_types.Completion, response_types.CompletionPiece),
    *(response_types.ChatCompletion, response_types.ChatCompletionPiece),
    *(response_types.ModelList, response_types.MetricsTarget, response_types.Health, response_types.Root),
    response_types.ReceiptKeys,
)


class _Schemas(GenerateJsonSchema):
    """Pydantic's schemas, without titles of fields, and closed for answers."""

    def typed_dict_schema(self, schema: TypedDictSchema) -> dict[str, Any]:
        return {**super().typed_dict_schema(schema), "additionalProperties": False}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def document(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        license_info=app.license_info,
        routes=[_without_head(one) for one in app.routes],
    )
    for operations in found["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # invalid parameters are 400 here
    scheme = {"key": {"type": "http", "scheme": "bearer"}}
    found["components"] = {"schemas": _schemas(), "securitySchemes": scheme}
    return {**found, "security": [{}, {"key": []}]}


def _without_head(one: BaseRoute) -> BaseRoute:
    found = copy(one)
    if isinstance(found, APIRoute):
        found.methods = (found.methods or set()) - {"HEAD"}
    return found


@cache
def _schemas() -> dict[str, Any]:
    _, schemas = TypeAdapter.json_schemas(
        [(one, "validation", TypeAdapter(one)) for one in _COMPONENTS],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Schemas,
    )
    defined: dict[str, Any] = schemas["$defs"]
    return defined
