"""Keys on both public APIs: keys are required, callers are identified, bodies are bounded."""

import asyncio

import grpc
import httpx
import pytest

from gammaray.errors import UnauthenticatedError
from gammaray.security.keys import create_key, make_secret
from gammaray.v1 import generation_service_pb2 as pb
from orchestrator.access.caller import PRIORITY_HEADER, Authenticator
from orchestrator.api.grpc_servicer import GenerationServicer
from orchestrator.api.http import bodies as http_bodies
from orchestrator.api.http.auth import PUBLIC_PATHS
from orchestrator.api.http.server.app import create_app
from tests.support.grpc_helpers import Context
from tests.support.surface_helpers import ScriptedBackend

PROMPT = {"prompt": "x"}
JSON = {"content-type": "application/json"}


@pytest.fixture
def door(tmp_path):
    path = tmp_path / "keys.json"
    keys = [create_key(path, tenant)[1] for tenant in ("acme", "beta")]
    return Authenticator(path), keys


def client(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def bearer(key, **headers):
    return {"authorization": f"Bearer {key}", **headers}


async def test_http_every_route_but_the_public_ones_needs_a_key(door):
    authenticator, _ = door
    app = create_app(ScriptedBackend(), authenticator=authenticator)
    routes = [(method, route.path) for route in app.routes for method in sorted(route.methods)]
    assert len(routes) >= 6
    async with client(app) as http:
        for method, path in [*routes, ("GET", "/no/such/path"), ("POST", "/v1/none")]:
            answer = await http.request(method, path)
            if path in PUBLIC_PATHS:
                assert answer.status_code == 200, path
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert answer.json()["error"]["type"] == "authentication_error"
                assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_http_wrong_key_is_not_repeated_in_the_answer(door):
    app = create_app(ScriptedBackend(), authenticator=door[0])
    secret = make_secret()
    async with client(app) as http:
        answer = await http.post("/v1/completions", json=PROMPT, headers=bearer(secret))
    assert answer.status_code == 401
    assert secret not in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_http_caller_reaches_the_backend(door, stream, path):
    authenticator, (_, beta) = door
    backend = ScriptedBackend()
    body = PROMPT if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    async with client(create_app(backend, authenticator=authenticator)) as http:
        headers = bearer(beta, **{PRIORITY_HEADER: "4"})
        answer = await http.post(path, json={**body, "stream": stream}, headers=headers)
    assert answer.status_code == 200, answer.text
    (caller,) = backend.callers
    assert (caller.tenant, caller.priority) == ("beta", 4)


async def test_http_bodies_are_bounded_in_total():
    release, is_held = asyncio.Event(), asyncio.Event()

    async def slow_body():
        yield b'{"prompt": "'
        yield b"x" * 1000
        is_held.set()
        await release.wait()
        yield b'"}'

    app = create_app(ScriptedBackend(), max_bodies_bytes=1500)
    async with client(app) as http:
        first = asyncio.create_task(http.post("/v1/completions", content=slow_body(), headers=JSON))
        await asyncio.wait_for(is_held.wait(), 30)
        second = await http.post("/v1/completions", json={"prompt": "y" * 1000})
        assert second.status_code == 429
        assert int(second.headers["retry-after"]) >= 1
        release.set()
        assert (await asyncio.wait_for(first, 30)).status_code == 200
        third = await http.post("/v1/completions", json={"prompt": "y" * 1000})
        assert third.status_code == 200


async def test_http_body_that_does_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr(http_bodies, "BODY_TIMEOUT_S", 0.05)

    async def endless_body():
        yield b"{"
        await asyncio.sleep(30)

    async with client(create_app(ScriptedBackend())) as http:
        answer = await asyncio.wait_for(
            http.post("/v1/completions", content=endless_body(), headers=JSON), 10
        )
    assert answer.status_code == 408


async def test_grpc_call_needs_a_key_on_every_method(door):
    backend = ScriptedBackend()
    servicer = GenerationServicer(backend, authenticator=door[0])
    context = Context(**bearer(door[1][0]))
    assert [r async for r in servicer.generate(pb.GenerateRequest(text="x"), context)]
    assert context.code is None
    assert backend.callers[0].tenant == "acme"
    for metadata in ({}, bearer(make_secret()), {"authorization": b"Bearer x"}):
        context = Context(**metadata)
        assert [r async for r in servicer.generate(pb.GenerateRequest(text="x"), context)] == []
        assert context.code is grpc.StatusCode.UNAUTHENTICATED
        assert isinstance(context.error, UnauthenticatedError)
        context = Context(**metadata)
        assert not (await servicer.get_status(pb.GetStatusRequest(), context)).processes
        assert context.code is grpc.StatusCode.UNAUTHENTICATED


async def test_root_names_the_model_only_to_those_who_may_ask_for_it(door):
    authenticator, (_, beta) = door
    async with client(create_app(ScriptedBackend(), authenticator=authenticator)) as http:
        assert "model" not in (await http.get("/")).json()
        assert "model" not in (await http.get("/", headers=bearer(make_secret()))).json()
        assert (await http.get("/", headers=bearer(beta))).json()["model"] == "scripted"
    async with client(create_app(ScriptedBackend())) as http:
        assert (await http.get("/")).json()["model"] == "scripted"
        for path in ("/", "/health", "/v1/models", "/v1/models/scripted", "/metrics", "/openapi.json"):
            answers = [await http.request(method, path) for method in ("GET", "HEAD")]
            assert [answer.status_code for answer in answers] == [200, 200], path
