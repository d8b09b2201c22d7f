"""Calls of the OpenAI-compatible API over a scripted orchestrator."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn

from orchestrator.api.http.server.app import create_app
from tests.support.surface_helpers import SUMMARY

SUMMED = ("cycles", "tokens_per_cycle", "alpha", "acceptance_rate")
SUMMED += ("gamma_mean", "drafted_tokens", "accepted_tokens")
GAMMARAY = {
    **{"session_id": "s0", "seed": 0},
    **{name: getattr(SUMMARY, name) for name in SUMMED},
    **{"accepted_lengths": [1, 1], "origins": ["accepted"] * 3, "token_ids": [1, 2, 3]},
    "time_ms": {"draft": 1.0, "verify": 2.0, "other": 0.5, "total": 3.5},
    "cycles_by_drafter": {"model": 1, "head": 0, "suffix": 0, "prediction": 0, "grammar": 0, "none": 0},
    **{"fallback_cycles": 1, "draft_workers": 1, "speedup_estimate": None},
}
CHAT = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "x"},
}
"""The smallest ones."""


def scope_of(path):
    """Return the ASGI scope of a POST of JSON from the machine itself."""
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": ""}
    return {**scope, "headers": headers, "query_string": b"", "http_version": "1.1", "scheme": "http"}


def http_client(backend, **options) -> httpx.AsyncClient:
    """Return a client of an application in this process, made with options."""
    transport = httpx.ASGITransport(create_app(backend, **options))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8000", timeout=120)


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """Serve an ASGI application on a free loopback port, in this event loop, and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        task = asyncio.ensure_future(server.serve([listener]))
        try:
            async with asyncio.timeout(30):
                while not server.started:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, 30)


async def call(backend, method="POST", path="/v1/completions", **options):
    async with http_client(backend) as http:
        return await http.request(method, path, **options)


async def complete(backend, path="/v1/completions", **body):
    return await call(backend, path=path, json=body)


async def events(backend, path="/v1/completions", **body):
    return [data for _, data in await events_with_ids(backend, path, **body)]


async def events_with_ids(backend, path="/v1/completions", last_id=None, **body):
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    answer = await call(backend, path=path, json={"stream": True, **body}, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, end = answer.text.split("\n\n")
    assert end == ""
    found = [re.fullmatch(r"(?:id: (\S+)\n)?data: (.*)", part) for part in parts]
    return [(match[1], match[2]) for match in found]
