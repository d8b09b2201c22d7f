"""Who may call: keys on both public APIs; where none is asked for, pages of other web sites are refused."""

import asyncio

import grpc
import pytest
from pydantic import ValidationError

from gammaray.config import ClusterSettings, OrchestratorSettings
from gammaray.errors import InvalidArgumentError, UnauthenticatedError
from gammaray.security.keys import create_key, make_secret
from gammaray.v1 import generation_service_pb2 as pb
from orchestrator.access.caller import PRIORITY_HEADER, Authenticator
from orchestrator.api.grpc_servicer import GenerationServicer
from orchestrator.api.http import bodies as http_bodies
from orchestrator.api.http.auth import PUBLIC_PATHS
from orchestrator.api.http.server.app import create_app
from orchestrator.launcher.trust import arrange_trust
from tests.support.grpc_helpers import Context
from tests.support.http_helpers import http_client
from tests.support.surface_helpers import ScriptedBackend

JSON = {"content-type": "application/json"}
BODY = b'{"prompt": "x"}'


async def send(method="POST", path="/v1/completions", *, headers, content=BODY, **options):
    backend = ScriptedBackend()
    async with http_client(backend, **options) as http:
        return await http.request(method, path, headers=headers, content=content), backend


def check_refused(answer, backend, status, name, got):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", name)
    assert error["message"].startswith(f"{name}: got {got}, allowed: ")
    assert backend.requests == []
    assert not any(header.startswith("access-control") for header in answer.headers)


OTHER_HOSTS = [
    *("evil.example:8000", "localhost.evil.example:8000", "evil.example.localhost.evil", "notlocalhost"),
    *("127.0.0.1.evil.example", "127.0.0.1@evil.example", "[::1].evil.example", "evil.example:localhost", ""),
]


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/"), ("GET", "/health")])
async def test_other_host_is_refused_on_every_path(method, path, subtests):
    for host in OTHER_HOSTS:
        with subtests.test(host):
            answer, backend = await send(method, path, headers={**JSON, "host": host})
            check_refused(answer, backend, 403, "Host", host)


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        ("", "localhost", 200),
        ("", "LocalHost.", 200),
        ("", "a.localhost:1", 200),
        ("", "[::1]:8000", 200),
        ("", "10.1.2.3:8000", 200),
        ("api.example.com", "api.example.com:80", 200),
        ("API.example.com", "api.example.COM", 200),
        ("api.example.com", "x.api.example.com", 403),
        (".example.com, other", "a.b.example.com", 200),
        (".example.com, other", "example.com", 200),
        (".example.com, other", "other:8000", 200),
        (".example.com, other", "badexample.com", 403),
        ("*", "evil.example", 200),
    ],
)
async def test_loopback_names_and_addresses_and_those_of_the_setting_are_served(allowed, host, status):
    answer, _ = await send(headers={**JSON, "host": host}, allowed_hosts=allowed)
    assert answer.status_code == status, answer.text


OTHER_PAGES = [
    *("https://evil.example", "null", "http://localhost:3000", "http://localhost:8000.evil.example"),
    *("http://localhost", "file://", "x", "http://[", "http://localhost:8000@evil.example"),
]


@pytest.mark.parametrize("origin", OTHER_PAGES)
@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
async def test_page_of_another_site_is_refused_and_so_is_its_preflight(method, origin):
    headers = {**JSON, "origin": origin, "access-control-request-method": "POST"}
    answer, backend = await send(method, headers=headers)
    check_refused(answer, backend, 403, "Origin", origin)


@pytest.mark.parametrize(
    ("host", "origin", "allowed"),
    [
        ("localhost:8000", "http://localhost:8000", ""),
        ("localhost:80", "http://localhost", ""),  # a proxy that passes $host:$server_port on
        ("localhost:", "http://localhost:", ""),
        ("localhost:443", "https://localhost", ""),
        ("127.0.0.1:8000", "https://api.example.com", "api.example.com"),  # a proxy that changes it
    ],
)
async def test_own_page_is_served(host, origin, allowed):
    answer, _ = await send(headers={**JSON, "host": host, "origin": origin}, allowed_hosts=allowed)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "kind", ["text/plain", "multipart/form-data; boundary=application/json", "", None], ids=repr
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_body_that_is_not_json_by_content_type_is_refused(path, kind):
    answer, backend = await send(path=path, headers={} if kind is None else {"content-type": kind})
    check_refused(answer, backend, 415, "Content-Type", "nothing" if kind is None else repr(kind))


async def test_content_type_may_have_capitals_and_parameters():
    answer, _ = await send(headers={"content-type": "Application/JSON; charset=utf-8"})
    assert answer.status_code == 200, answer.text


@pytest.fixture
def door(tmp_path):
    path = tmp_path / "keys.json"
    keys = [create_key(path, tenant)[1] for tenant in ("acme", "beta")]
    return Authenticator(path), keys


def bearer(key, **headers):
    return {"authorization": f"Bearer {key}", **headers}


async def test_with_keys_any_host_and_origin_are_accepted(door):
    authenticator, (acme, _) = door
    headers = {**JSON, "host": "gammaray.example.com", "origin": "https://app.example.org"}
    for given, status in ((headers, 401), (bearer(acme, **headers), 200)):
        answer, _ = await send(headers=given, authenticator=authenticator)
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize("allowed", ["http://a", "a:80", "a b", "a..b", "a,,b", "[::1]"])
def test_invalid_host_name_in_the_setting_is_rejected(allowed):
    for settings in (OrchestratorSettings, ClusterSettings):
        with pytest.raises(ValidationError, match="allowed_hosts"):
            settings(allowed_hosts=allowed)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "myhost.example.com"])
def test_cluster_is_served_under_its_own_names(host, tmp_path):
    settings = ClusterSettings(host=host, api_keys_file="none", allowed_hosts="a.example, .b.example")
    names = OrchestratorSettings(**arrange_trust(settings).orchestrator).allowed_hosts
    assert names.startswith("a.example, .b.example")
    assert ("myhost.example.com" in names) is (host == "myhost.example.com")
    assert OrchestratorSettings(allowed_hosts=names).allowed_hosts == names


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


@pytest.mark.parametrize("with_keys", [False, True])
async def test_browser_applications_of_named_origins_may_call(with_keys, door):
    own, authenticator = (bearer(door[1][0]), door[0]) if with_keys else ({}, None)
    origins = "http://localhost:3000, app://obsidian.md"
    async with http_client(ScriptedBackend(), authenticator=authenticator, cors_origins=origins) as http:

        async def ask(origin, method="POST", route="/v1/completions", body="{}", **headers):
            headers = {name.replace("_", "-"): value for name, value in headers.items()}
            headers = {**JSON, "origin": origin, **headers}
            return await http.request(method, route, content=body, headers=headers)

        for origin in ("http://localhost:3000", "app://obsidian.md"):
            preflight = await ask(origin, "OPTIONS", body="", **PREFLIGHT)
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == origin
            assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
            right = await ask(origin, body='{"prompt": "x"}', **own)
            assert (right.status_code, right.headers["access-control-allow-origin"]) == (200, origin)
            unwelcome = (ask(origin), 401) if with_keys else (ask(origin, host="evil.example"), 403)
            wrong = [
                (ask(origin, **own), 400),
                (ask(origin, "GET", "/v1/none", **own), 404),
                (ask(origin, "PUT", **own), 405),
                unwelcome,
            ]
            for asked, status in wrong:
                answer = await asked
                assert answer.status_code == status
                assert answer.headers["access-control-allow-origin"] == origin
        for origin in ("http://localhost:3001", "https://localhost:3000", "http://evil.example", "null"):
            for answer in (await ask(origin, "OPTIONS", body="", **PREFLIGHT), await ask(origin, **own)):
                assert answer.status_code in (400, 403)
                assert "access-control-allow-origin" not in answer.headers


def test_all_origins_need_keys_and_origins_have_their_form():
    for settings in (OrchestratorSettings, ClusterSettings):
        with pytest.raises((ValidationError, InvalidArgumentError), match="cors_origins"):
            settings(cors_origins="*")
        assert settings(cors_origins="*", api_keys_file="keys.json").cors_origins == "*"
        for origin in ("localhost", "http://a/", "http://*.example", "http://a b", "HTTP://a"):
            with pytest.raises(ValidationError, match="cors_origins"):
                settings(cors_origins=origin)
    given = ClusterSettings(cors_origins="http://a:3000,https://b")
    assert arrange_trust(given).orchestrator["cors_origins"] == "http://a:3000,https://b"


PROMPT = {"prompt": "x"}


async def test_http_every_route_but_the_public_ones_needs_a_key(door):
    app, secret = create_app(ScriptedBackend(), authenticator=door[0]), make_secret()
    routes = [(method, route.path) for route in app.routes for method in sorted(route.methods)]
    assert len(routes) >= 6
    async with http_client(ScriptedBackend(), authenticator=door[0]) as http:
        for method, path in [*routes, ("GET", "/no/such/path"), ("POST", "/v1/none")]:
            answer = await http.request(method, path)
            if path in PUBLIC_PATHS:
                assert answer.status_code == 200, path
                continue
            assert answer.status_code == 401, (method, path)
            wrong = await http.request(method, path, headers=bearer(secret))
            assert (wrong.status_code, secret in wrong.text) == (401, False)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert answer.json()["error"]["type"] == "authentication_error"
                assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_http_caller_reaches_the_backend(door, stream, path):
    authenticator, (_, beta) = door
    backend = ScriptedBackend()
    body = PROMPT if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    async with http_client(backend, authenticator=authenticator) as http:
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

    async with http_client(ScriptedBackend(), max_bodies_bytes=1500) as http:
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

    async with http_client(ScriptedBackend()) as http:
        answer = await asyncio.wait_for(
            http.post("/v1/completions", content=endless_body(), headers=JSON), 10
        )
    assert answer.status_code == 408


async def test_grpc_call_needs_a_key_on_every_method(backend, door):
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
    async with http_client(ScriptedBackend(), authenticator=authenticator) as http:
        assert "model" not in (await http.get("/")).json()
        assert "model" not in (await http.get("/", headers=bearer(make_secret()))).json()
        assert (await http.get("/", headers=bearer(beta))).json()["model"] == "scripted"
    async with http_client(ScriptedBackend()) as http:
        assert (await http.get("/")).json()["model"] == "scripted"
        for path in ("/", "/health", "/v1/models", "/v1/models/scripted", "/metrics", "/openapi.json"):
            answers = [await http.request(method, path) for method in ("GET", "HEAD")]
            assert [answer.status_code for answer in answers] == [200, 200], path
