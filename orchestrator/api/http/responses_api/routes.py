"""The paths of the Responses API."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, get_args

import fastapi
from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from gammaray.errors import InvalidArgumentError
from orchestrator.api.backend import Backend
from orchestrator.api.http.auth import caller_of
from orchestrator.api.http.bodies import BodyReader
from orchestrator.api.http.document import EVENTS, JSON, LOOKING_UP, event_schema, route
from orchestrator.api.http.errors import STATUSES
from orchestrator.api.http.models import parse_body
from orchestrator.api.http.requests import is_quick
from orchestrator.api.http.responses_api.generation import ResponseRun
from orchestrator.api.http.responses_api.models import LOGPROBS, Includable, ResponsesRequest
from orchestrator.api.http.responses_api.records import MAX_LISTED, Order, ResponseRecords
from orchestrator.api.http.responses_api.requests import plan_response
from orchestrator.api.http.responses_api.types import DeletedResponse, Event
from orchestrator.api.http.stream import EventStream, json_in_pieces, while_connected
from orchestrator.text.cpu_threads import in_parser_thread


class _Reading(BaseModel):
    """Parameters of the URL of a stored response."""

    model_config = ConfigDict(extra="forbid")

    include: list[Includable] = []
    includes: list[Includable] = Field([], alias="include[]")


class _Listing(_Reading):
    """Parameters of the URL of a response's input."""

    limit: int = Field(20, ge=1, le=MAX_LISTED)
    order: Order = "desc"
    after: str | None = None


def add_responses(app: FastAPI, backend: Backend, bodies: BodyReader) -> None:
    path, errors = "/v1/responses/{response_id}", (*LOOKING_UP, 404)
    streamed: dict[str, Any] = {
        JSON: "ResponseObject",
        EVENTS: event_schema([one.__name__ for one in get_args(Event)], is_named=True),
    }
    meaning = "The response; with `stream` its events, as server-sent events."

    created = route("createResponse", meaning, streamed, tuple(STATUSES), "ResponsesRequest")

    @app.post("/v1/responses", **created)
    async def create(request: Request) -> fastapi.Response:
        caller = caller_of(request)
        async with bodies.read(request) as data:
            is_small = is_quick(data, backend.tokenizer)
            parse = partial(parse_body, ResponsesRequest, data)
            body = parse() if is_small else await in_parser_thread(parse)
            earlier = []
            if body.previous_response_id is not None:
                earlier = await ResponseRecords(backend, caller).items_after(body.previous_response_id)
            if is_small and not earlier:
                plan = plan_response(body, backend)
            else:
                plan = await in_parser_thread(plan_response, body, backend, earlier)
        run = ResponseRun(backend, plan, caller)
        if not body.stream:
            return json_in_pieces(await while_connected(request, run.whole()))
        events = run.stream(is_padded=body.stream_options.include_obfuscation)
        return EventStream(await while_connected(request, anext(events)), events)

    meaning = "A stored response."

    @app.get(path, **route("getResponse", meaning, {JSON: "ResponseObject"}, errors))
    async def retrieve(
        response_id: str, query: Annotated[_Reading, Query()], request: Request
    ) -> fastapi.Response:
        if LOGPROBS in (*query.include, *query.includes):
            allowed = "nothing that is not stored: only the answer to POST has log-probabilities"
            raise InvalidArgumentError("include", LOGPROBS, allowed)
        _, stored = await ResponseRecords(backend, caller_of(request)).read(response_id)
        return fastapi.Response(stored.response, media_type=JSON)

    meaning = "The response and its session are deleted."

    @app.delete(path, **route("deleteResponse", meaning, {JSON: "DeletedResponse"}, errors))
    async def delete(response_id: str, request: Request) -> fastapi.Response:
        await ResponseRecords(backend, caller_of(request)).delete(response_id)
        deleted: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
        return JSONResponse(deleted)

    meaning = "The items before the response's output, those of earlier responses included."

    @app.get(f"{path}/input_items", **route("listInputItems", meaning, {JSON: "ItemList"}, errors))
    async def input_items(
        response_id: str, query: Annotated[_Listing, Query()], request: Request
    ) -> fastapi.Response:
        records = ResponseRecords(backend, caller_of(request))
        return JSONResponse(await records.input_items(response_id, query.limit, query.order, query.after))
