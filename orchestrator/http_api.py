"""The OpenAI-compatible HTTP API over any `Backend`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import fastapi
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from gammaray.errors import CancelledError, NotFoundError, UnavailableError
from orchestrator.access.caller import Authenticator
from orchestrator.backend import Backend
from orchestrator.http_access import AccessControl, caller_of
from orchestrator.http_bodies import MAX_BODY_BYTES, Bodies
from orchestrator.http_errors import as_gammaray_error, error_response, install_handlers
from orchestrator.http_json import encode
from orchestrator.http_metrics import add_metrics
from orchestrator.http_models import ChatRequest, CompletionRequest, parse_body
from orchestrator.http_requests import ChoicePlan, chat_choices, completion_choices
from orchestrator.http_responses import ChatResponse, CompletionResponse, Response
from orchestrator.http_resume import HEADER, EventId, recall, resumed
from orchestrator.http_sites import Hosts, SiteControl
from orchestrator.http_stream import EventStream, generate_all
from orchestrator.openapi import add_document
from orchestrator.playground import playground
from orchestrator.text.cpu_threads import INLINE_BYTES, in_parser_thread, in_thread

__all__ = ["MAX_BODY_BYTES", "create_app"]

_MAX_BODIES_BYTES = 256 * 2**20

INLINE_ENTRIES = 1024
"""Tokens and alternatives of an answer that is rendered on the event loop: some milliseconds."""

_Body = TypeVar("_Body", CompletionRequest, ChatRequest)


def create_app(
    backend: Backend,
    close: Callable[[], Awaitable[None]] | None = None,
    authenticator: Authenticator | None = None,
    max_bodies_bytes: int = _MAX_BODIES_BYTES,
    allowed_hosts: str = "",
) -> FastAPI:
    """Return the ASGI application.

    Args:
        backend: What generates.
        close: Awaited when the application shuts down.
        authenticator: Knows the API keys; None lets everybody in.
        max_bodies_bytes: Upper bound of all request bodies held at once.
        allowed_hosts: Names of this server for requests without a key, see `orchestrator.http_sites.Hosts`.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        if close is not None:
            await close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    install_handlers(app)
    authenticator = authenticator or Authenticator()
    app.add_middleware(AccessControl, authenticator=authenticator)
    if authenticator.is_open:
        app.add_middleware(SiteControl, hosts=Hosts(allowed_hosts))
    _add_generation(app, backend, Bodies(max_bodies_bytes))
    _add_information(app, backend)
    add_metrics(app, backend)
    add_document(app)
    return app


def _add_generation(app: FastAPI, backend: Backend, bodies: Bodies) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> fastapi.Response:
        async def answer() -> fastapi.Response:
            async with bodies.read(request) as data:
                body, plans = await _planned(_plan_completions, backend, data)
            response = CompletionResponse(backend.model_name, plans, backend.token_bytes, backend.is_special)
            return await _generate(backend, plans, response, body, request)

        return await _guarded(answer)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> fastapi.Response:
        async def answer() -> fastapi.Response:
            async with bodies.read(request) as data:
                body, plans = await _planned(_plan_chat, backend, data)
            response = ChatResponse(backend.model_name, plans, backend.token_bytes, backend.is_special)
            return await _generate(backend, plans, response, body, request)

        return await _guarded(answer)


def _add_information(app: FastAPI, backend: Backend) -> None:
    started_at = int(time.time())

    def model() -> dict[str, Any]:
        return {
            "id": backend.model_name,
            "object": "model",
            "created": started_at,
            "owned_by": "gammaray",
            "max_model_len": backend.max_context,
        }

    @app.get("/")
    async def root(request: Request) -> fastapi.Response:
        if "text/html" in request.headers.get("accept", ""):
            return playground()
        return JSONResponse(
            {"name": "gammaray", "model": backend.model_name, "endpoints": ["/v1", "/health"]}
        )

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        if name != backend.model_name:
            raise NotFoundError(f"no model {name!r}; this server has {backend.model_name!r}", "model")
        return model()

    @app.get("/health")
    async def health() -> fastapi.Response:
        async def answer() -> fastapi.Response:
            processes = await backend.status()
            if not any(process.role == "target" and process.healthy for process in processes):
                raise UnavailableError("no target worker is there")
            return JSONResponse({"status": "ok"})

        return await _guarded(answer)


async def _planned(
    plan: Callable[[Backend, bytes], tuple[_Body, list[ChoicePlan]]], backend: Backend, data: bytes
) -> tuple[_Body, list[ChoicePlan]]:
    """Return what `plan` makes of a body; a large one is read off the event loop."""
    if len(data) <= INLINE_BYTES:
        return plan(backend, data)
    return await in_parser_thread(plan, backend, data)


def _plan_completions(backend: Backend, data: bytes) -> tuple[CompletionRequest, list[ChoicePlan]]:
    body = parse_body(CompletionRequest, data)
    return body, completion_choices(body, backend.max_context, backend.decode)


def _plan_chat(backend: Backend, data: bytes) -> tuple[ChatRequest, list[ChoicePlan]]:
    body = parse_body(ChatRequest, data)
    prompt = backend.render_chat([message.model_dump() for message in body.messages])
    return body, chat_choices(body, prompt, backend.max_context)


async def _generate(
    backend: Backend,
    plans: list[ChoicePlan],
    response: Response,
    body: CompletionRequest | ChatRequest,
    request: Request,
) -> fastapi.Response:
    caller, last_id = caller_of(request), request.headers.get(HEADER)
    seen = None if last_id is None else EventId.parse(last_id)
    if seen is not None:
        plans = resumed(plans, seen, is_stream=body.stream)
        await recall(response, backend, seen, caller)
    requests = [plan.request for plan in plans]
    if body.stream:
        options = body.stream_options
        return await EventStream.open(backend, requests, response, options, caller=caller, seen=seen)
    async with generate_all(backend, requests, caller) as pieces:
        async for index, chunk in pieces:
            response.add(index, chunk)
    if response.num_entries <= INLINE_ENTRIES:
        return JSONResponse(response.whole())
    content = await in_thread(lambda: encode(response.whole()))
    return fastapi.Response(content, media_type=JSONResponse.media_type)


async def _guarded(answer: Callable[[], Awaitable[fastapi.Response]]) -> fastapi.Response:
    """Turn what `answer` raises into an OpenAI error object, a bug of ours included."""
    try:
        return await answer()
    except ClientDisconnect:
        return fastapi.Response(status_code=CancelledError.http_status)  # nobody reads it
    except Exception as error:
        return error_response(as_gammaray_error(error))
