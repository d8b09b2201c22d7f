"""The paths of the Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from functools import partial
from typing import get_args

import fastapi
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from gammaray.errors import FailedPreconditionError, InvalidArgumentError
from orchestrator.api.backend import Backend
from orchestrator.api.http.auth import caller_of
from orchestrator.api.http.bodies import BodyReader
from orchestrator.api.http.errors import guarded
from orchestrator.api.http.models import parse_body
from orchestrator.api.http.responses_api.events import replay
from orchestrator.api.http.responses_api.generation import ResponseRun, last_event, rendered
from orchestrator.api.http.responses_api.models import INCLUDABLE, LOGPROBS, ResponsesRequest
from orchestrator.api.http.responses_api.records import (
    MAX_LISTED,
    MAX_SEQUENCE_NUMBER,
    Order,
    Record,
    ResponseRecords,
)
from orchestrator.api.http.responses_api.requests import plan_response
from orchestrator.api.http.responses_api.types import DeletedResponse
from orchestrator.api.http.stream import EventStream, JsonPieces
from orchestrator.text.cpu_threads import INLINE_BYTES, in_parser_thread

_DEFAULT_LISTED = 20

_REPLAY_BATCH = 64
"""Events of a stored response that are made in one go, in about a millisecond."""


def add_responses(app: FastAPI, backend: Backend, bodies: BodyReader) -> None:
    """Add the paths of the Responses API."""

    @app.post("/v1/responses")
    async def create(request: Request) -> fastapi.Response:
        return await guarded(lambda: _create(backend, bodies, request))

    @app.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str, request: Request) -> fastapi.Response:
        async def answer() -> fastapi.Response:
            query = _query(request, ("stream", "starting_after", "include_obfuscation", "include"))
            if LOGPROBS in request.query_params.values():
                allowed = "nothing that is not stored: only the answer to POST has log-probabilities"
                raise InvalidArgumentError("include", LOGPROBS, allowed)
            is_streamed, is_padded = _flag(query, "stream"), _flag(query, "include_obfuscation")
            after = _integer(query, "starting_after", 0, MAX_SEQUENCE_NUMBER, -1)
            if after >= 0 and not is_streamed:
                raise InvalidArgumentError("starting_after", after, "no value without stream=true")
            record = await ResponseRecords(backend, caller_of(request)).read(response_id)
            if not is_streamed:
                return fastapi.Response(record.text, media_type=JSONResponse.media_type)
            if record.response["status"] == "in_progress":
                raise FailedPreconditionError("the response is in progress; its stream is not shared")
            return EventStream(b"", _replayed(record, after, is_padded=is_padded))

        return await guarded(answer)

    @app.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, request: Request) -> fastapi.Response:
        async def answer() -> fastapi.Response:
            await ResponseRecords(backend, caller_of(request)).delete(response_id)
            deleted: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
            return JSONResponse(deleted)

        return await guarded(answer)

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str, request: Request) -> fastapi.Response:
        async def answer() -> fastapi.Response:
            await ResponseRecords(backend, caller_of(request)).read(response_id)
            allowed = "a response with background: true, which this server does not have; close its stream"
            raise InvalidArgumentError("response_id", "a response without background", allowed)

        return await guarded(answer)

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str, request: Request) -> fastapi.Response:
        async def answer() -> fastapi.Response:
            query = _query(request, ("limit", "order", "after", "include"))
            limit = _integer(query, "limit", 1, MAX_LISTED, _DEFAULT_LISTED)
            order: Order = "asc" if query.get("order") == "asc" else "desc"
            if query.get("order", order) not in get_args(Order):
                raise InvalidArgumentError("order", query["order"], "asc or desc")
            records = ResponseRecords(backend, caller_of(request))
            return JSONResponse(await records.input_items(response_id, limit, order, query.get("after")))

        return await guarded(answer)


async def _create(backend: Backend, bodies: BodyReader, request: Request) -> fastapi.Response:
    caller = caller_of(request)
    async with bodies.read(request) as data:
        is_small = len(data) <= INLINE_BYTES
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
        return JsonPieces(await run.whole())
    events = run.stream(is_padded=body.stream_options.include_obfuscation)
    return EventStream(await anext(events), events)


async def _replayed(record: Record, after: int, *, is_padded: bool) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stored response after one of them."""
    for number, event in enumerate(replay(record.response, record.pieces)):
        if isinstance(event, tuple):
            if event[1] > after:
                yield b"".join(last_event(event, (record.text,)))
        elif event["sequence_number"] > after:
            yield b"".join(rendered(event, is_padded=is_padded))
        if number % _REPLAY_BATCH == 0:
            await asyncio.sleep(0)


def _query(request: Request, names: Collection[str]) -> Mapping[str, str]:
    """Return the parameters of a URL; `include` may occur several times, and changes nothing here.

    Raises:
        InvalidArgumentError: A parameter is unknown, or includes something unknown.
    """
    found = {}
    for name, value in request.query_params.multi_items():
        name = name.removesuffix("[]")
        if name not in names:
            raise InvalidArgumentError(name, value, f"no such parameter; known are {', '.join(names)}")
        if name == "include" and value not in INCLUDABLE:
            raise InvalidArgumentError("include", value, " or ".join(INCLUDABLE))
        found[name] = value
    return found


def _flag(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "false").lower()
    if value not in ("true", "false"):
        raise InvalidArgumentError(name, value, "true or false")
    return value == "true"


def _integer(query: Mapping[str, str], name: str, low: int, high: int, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if text.isascii() and text.isdigit() and len(text) <= 16 and low <= int(text) <= high:
        return int(text)
    raise InvalidArgumentError(name, text, f"an integer in [{low}, {high}]")
