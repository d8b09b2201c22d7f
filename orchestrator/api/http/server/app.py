"""The OpenAI-compatible HTTP API over any `Backend`, its metrics endpoints and the page at `/`."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from itertools import zip_longest
from typing import Any, cast

import fastapi
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.middleware.cors import CORSMiddleware

from gammaray import __version__
from gammaray.errors import NotFoundError, UnavailableError, renaming
from gammaray.types import ProcessStatus, SpeculationTotals
from orchestrator.access.caller import Authenticator
from orchestrator.api.backend import Backend
from orchestrator.api.http.auth import DOCUMENT_PATH, RECEIPT_KEYS_PATH, AccessControl, caller_of
from orchestrator.api.http.bodies import BodyReader
from orchestrator.api.http.document import EVENTS, JSON, LOOKING_UP, TEXT, component, event_schema, route
from orchestrator.api.http.errors import STATUSES, GuardedRoute, install_handlers
from orchestrator.api.http.fields import checked_tools
from orchestrator.api.http.json_text import INLINE_ENTRIES, encode_pieces
from orchestrator.api.http.models import ChatRequest, CompletionRequest, parse_body
from orchestrator.api.http.requests import (
    ChoicePlan,
    chat_choices,
    completion_choices,
    is_quick,
    naming_grammar,
)
from orchestrator.api.http.response_types import Health, MetricsTarget, Model, Root
from orchestrator.api.http.responses import ChatResponse, CompletionResponse, Response
from orchestrator.api.http.responses_api.routes import add_responses
from orchestrator.api.http.server.openapi import document
from orchestrator.api.http.sites import Hosts, listed
from orchestrator.api.http.stream import (
    HEADER,
    EventId,
    EventStream,
    generate_all,
    json_in_pieces,
    recall,
    response_events,
    resumed,
    while_connected,
)
from orchestrator.api.http.tools.calls import plan_calls, render_messages
from orchestrator.text.cpu_threads import in_parser_thread, in_thread

_ENGINE = "0"
"""Value of vLLM's label `engine`: all orchestrators together count as one engine."""

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)

_MAX_BODIES_BYTES = 256 * 2**20

_Planner = Callable[[Backend, bytes], tuple[CompletionRequest | ChatRequest, list[ChoicePlan]]]


def add_metrics(app: FastAPI, backend: Backend) -> None:
    """Add GET /metrics, and GET /metrics/targets for the `http_sd_configs` of Prometheus."""

    meaning = "vLLM's metrics about requests and speculation, in Prometheus's text format."

    @app.get("/metrics", **route("scrapeMetrics", meaning, {"text/plain": TEXT}))
    async def metrics() -> fastapi.Response:
        processes = await backend.status()
        if any(process.role == "redis" and not process.healthy for process in processes):
            # Without the other orchestrators the sums would fall, which a scraper interprets as a restart.
            raise UnavailableError("Redis, which lists the other orchestrators, cannot be reached")
        return fastapi.Response(vllm_metrics(processes), media_type=CONTENT_TYPE_LATEST)

    meaning = "Processes that serve metrics."
    content = {JSON: {"type": "array", "items": component("MetricsTarget")}}

    @app.get("/metrics/targets", **route("listMetricsTargets", meaning, content))
    async def metrics_targets() -> JSONResponse:
        return JSONResponse(targets(await backend.status()))


def targets(processes: list[ProcessStatus]) -> list[MetricsTarget]:
    """Return the processes that serve metrics, in the form of Prometheus's HTTP service discovery."""
    return [
        {
            "targets": [process.metrics_address],
            "labels": {"process": process.role, "pid": str(process.pid)},
        }
        for process in processes
        if process.metrics_address
    ]


def vllm_metrics(processes: Sequence[ProcessStatus]) -> bytes:
    """Return vLLM's metrics of requests and speculation, summed over the orchestrators, for Prometheus."""
    orchestrators = [process for process in processes if process.role == "orchestrator"]
    return generate_latest(_VllmCollector(orchestrators))


class _VllmCollector(Collector):
    """Converts the states of orchestrators to prometheus_client's metric families."""

    def __init__(self, orchestrators: Sequence[ProcessStatus]) -> None:
        self._orchestrators = orchestrators

    def collect(self) -> Iterator[Metric]:
        orchestrators = self._orchestrators
        totals = [process.speculation_totals or SpeculationTotals() for process in orchestrators]
        labels = {
            "model_name": next((process.model for process in orchestrators), ""),
            "engine": _ENGINE,
        }
        accepted = "Proposed tokens that were accepted and emitted."
        for name, meaning, values in (
            ("num_requests_running", "Running requests.", [p.sessions for p in orchestrators]),
            ("num_requests_waiting", "Waiting requests.", [p.num_queued for p in orchestrators]),
            ("generation_tokens", "Tokens emitted.", [own.emitted_tokens for own in totals]),
            ("spec_decode_num_drafts", "Proposals with at least one token.", [own.drafts for own in totals]),
            ("spec_decode_num_draft_tokens", "Proposed tokens.", [own.draft_tokens for own in totals]),
            ("spec_decode_num_accepted_tokens", accepted, [own.accepted_tokens for own in totals]),
        ):
            is_gauge = name.startswith("num_requests")
            family = (GaugeMetricFamily if is_gauge else CounterMetricFamily)(
                f"vllm:{name}", meaning, labels=list(labels)
            )
            family.add_metric(list(labels.values()), sum(values))
            yield family
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their depth in the proposal, from 0.",
            labels=[*labels, "position"],
        )
        counts = (process.accepted_per_position for process in orchestrators)
        for position, accepted_there in enumerate(zip_longest(*counts, fillvalue=0)):
            by_position.add_metric([*labels.values(), str(position)], sum(accepted_there))
        yield by_position


def playground() -> fastapi.Response:
    """Return the page; its CSP restricts it to its own inline script and to requests to this server."""
    page, policy = _page()
    return HTMLResponse(
        page,
        headers={
            "Cache-Control": "no-cache",
            "Content-Security-Policy": policy,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )


@cache
def _page() -> tuple[str, str]:
    page = files("orchestrator.api.http.server").joinpath("playground.html").read_text(encoding="utf-8")
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, body in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    policy = (
        "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; "
        f"img-src data:; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}"
    )
    return page, policy


def create_app(
    backend: Backend,
    close: Callable[[], Awaitable[None]] | None = None,
    authenticator: Authenticator | None = None,
    max_bodies_bytes: int = _MAX_BODIES_BYTES,
    allowed_hosts: str = "",
    cors_origins: str = "",
) -> FastAPI:
    """Return the ASGI application, which awaits `close` when it shuts down.

    `allowed_hosts` are names of this server for requests without a key, see `sites.Hosts`; `cors_origins`
    those of browser applications that may call it, separated by commas.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        if close is not None:
            await close()

    app = FastAPI(
        title="gammaray",
        version=__version__,
        description="Lossless speculative decoding, over OpenAI's API.",
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.router.route_class = GuardedRoute
    install_handlers(app)
    origins = listed(cors_origins)
    hosts = Hosts(allowed_hosts, origins)
    app.add_middleware(AccessControl, authenticator=authenticator or Authenticator(), hosts=hosts)
    if origins:  # outermost, as preflights have no key and errors need the headers as well
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("DELETE", "GET", "HEAD", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("Retry-After",),
        )
    bodies = BodyReader(max_bodies_bytes)
    _add_generation(app, backend, bodies)
    add_responses(app, backend, bodies)
    _add_information(app, backend)
    add_metrics(app, backend)
    return app


def _add_generation(app: FastAPI, backend: Backend, bodies: BodyReader) -> None:
    meaning = "The completion; with `stream` its pieces, as server-sent events."

    def generating(kind: str, body: str) -> dict[str, Any]:
        content = {JSON: kind, EVENTS: event_schema((f"{kind}Piece", "Error"), end="[DONE]")}
        return route(f"create{kind}", meaning, content, tuple(STATUSES), body, is_resumable=True)

    async def answer(
        request: Request, plan: _Planner, make: type[Response], **names: str
    ) -> fastapi.Response:
        async with bodies.read(request) as data:
            if is_quick(data, backend.tokenizer):
                body, plans = plan(backend, data)
            else:
                body, plans = await in_parser_thread(plan, backend, data)
        response = make(body.model or backend.model_name, plans, backend.tokenizer)
        with renaming(**names):
            return await while_connected(request, _generate(backend, plans, response, body, request))

    @app.post("/v1/completions", **generating("Completion", "CompletionRequest"))
    async def completions(request: Request) -> fastapi.Response:
        return await answer(request, _plan_completions, CompletionResponse)

    @app.post("/v1/chat/completions", **generating("ChatCompletion", "ChatRequest"))
    async def chat_completions(request: Request) -> fastapi.Response:
        return await answer(request, _plan_chat, ChatResponse, prompt="messages")


def _add_information(app: FastAPI, backend: Backend) -> None:
    content: dict[str, Any] = {JSON: "Root", "text/html": TEXT}

    @app.get("/", **route("root", "The server; the playground for browsers.", content, (403, 405)))
    async def root(request: Request) -> fastapi.Response:
        if "text/html" in request.headers.get("accept", ""):
            return playground()
        body: Root = {"name": "gammaray", "endpoints": ["/v1", "/health"]}
        if request.state.caller is not None:  # who may use the other paths, too
            body["model"] = backend.model_name
        return JSONResponse(body)

    _add_models(app, backend)

    @app.get("/health", **route("health", "A target worker is available.", {JSON: "Health"}, (403, 405, 503)))
    async def health() -> JSONResponse:
        if not any(process.role == "target" and process.healthy for process in await backend.status()):
            raise UnavailableError("no target worker is connected")
        well: Health = {"status": "ok"}
        return JSONResponse(well)

    meaning = "Public keys of receipts, former ones first, and dtypes of the targets: a JSON Web Key Set."

    @app.get(RECEIPT_KEYS_PATH, **route("listReceiptKeys", meaning, {JSON: "ReceiptKeys"}, (403, 405)))
    async def receipt_keys() -> JSONResponse:
        return JSONResponse(backend.receipts.published())

    @app.get(DOCUMENT_PATH, **route("describe", "This document.", {JSON: {"type": "object"}}, (403, 405)))
    async def openapi() -> JSONResponse:
        return JSONResponse(document(app))


def _add_models(app: FastAPI, backend: Backend) -> None:
    started_at = int(time.time())

    def model(name: str) -> Model:
        described: Model = {
            "id": name,
            "object": "model",
            "created": started_at,
            "owned_by": "gammaray",
            "max_model_len": backend.max_context,
            "gammaray": {
                "chat": bool(backend.tokenizer.chat_format.template),
                "drafters": backend.drafters,
            },
        }
        return described if name == backend.model_name else {**described, "parent": backend.model_name}

    def names() -> list[str]:
        return [backend.model_name, *backend.adapters]

    @app.get("/v1/models", **route("listModels", "The served models.", {JSON: "ModelList"}))
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model(name) for name in names()]})

    one = route("getModel", "The served model.", {JSON: "Model"}, (*LOOKING_UP, 404))

    @app.get("/v1/models/{name:path}", **one)
    async def one_model(name: str) -> JSONResponse:
        if name not in names():
            served = ", ".join(map(repr, names()))
            raise NotFoundError(f"no model {name!r}; this server has {served}", "model")
        return JSONResponse(model(name))


def _plan_completions(backend: Backend, data: bytes) -> tuple[CompletionRequest, list[ChoicePlan]]:
    body = parse_body(CompletionRequest, data)
    return body, completion_choices(body, backend.max_context, backend.tokenizer.decode)


def _plan_chat(backend: Backend, data: bytes) -> tuple[ChatRequest, list[ChoicePlan]]:
    body = parse_body(ChatRequest, data)
    messages, defined = body.conversation(), [tool.function for tool in body.tools]
    tools = checked_tools(defined, body.tool_choice, "tools.{}.function")
    calls = plan_calls(tools, body.tool_choice, body.parallel_tool_calls, backend.tokenizer)
    prompt = render_messages(messages, backend.tokenizer, calls)
    with renaming(prompt="messages"):
        return body, chat_choices(body, prompt, backend.tokenizer, backend.max_context, calls)


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
        events = response_events(backend, requests, response, body.stream_options, caller, seen)
        return EventStream(await anext(events), events)
    with naming_grammar(plans[0]):
        async with generate_all(backend, requests, caller) as pieces:
            async for index, chunk in pieces:
                response.add(index, chunk)
    if response.num_entries <= INLINE_ENTRIES:
        return json_in_pieces(list(encode_pieces(response.whole())))
    return json_in_pieces(await in_thread(lambda: list(encode_pieces(response.whole()))))


if __name__ == "__main__":  # prints the document; no route asks the backend before a request
    print(json.dumps(document(create_app(cast(Backend, None))), indent=1))
