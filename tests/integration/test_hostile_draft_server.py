"""Servers that draft and are broken, slow or hostile, over real HTTP: equal tokens, counted failures."""

from __future__ import annotations

import asyncio
import gzip
import logging
import ssl

import pytest

from gammaray.config import OrchestratorSettings
from gammaray.errors import InvalidArgumentError
from gammaray.types import DrafterKind, GammaPolicy, SamplingParams, VerificationMethod
from orchestrator.access.caller import ANONYMOUS
from orchestrator.drafting.http.client import Failure
from orchestrator.service import Orchestrator
from tests.support.tls_helpers import Authority, role_certificates
from tests.support.workers.draft_servers import fake_server, found, http
from tests.support.workers.resume_helpers import request_of
from tests.support.workers.scripted_workers import scripted, until, until_so
from tests.support.workers.service_helpers import complete, running, tokens_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NUM_TOKENS, GAMMA = 24, 3
SERVER = DrafterKind.SERVER
MB = 1_000_000


async def status_500(call, writer):
    return http(b'{"error": {"message": "no"}}', 500)


async def status_503(call, writer):
    return http(b"", 503, "retry-after: 1\r\n")


async def status_400(call, writer):
    return http(b'{"error": {"message": "prompt is too long"}}', 400)


async def redirect(call, writer):
    return http(b"", 307, f"location: http://{call.headers['host']}/v1/completions\r\n")


async def empty_body(call, writer):
    return http(b"")


async def closed(call, writer):
    return None


async def no_http(call, writer):
    return b"\x00\xffnonsense\r\n\r\n" * 20


async def no_json(call, writer):
    return http(b"<html>not found</html>")


async def cut_json(call, writer):
    return http(b'{"choices": [{"text": "a", "token_ids": [1,')


async def cut_body(call, writer):
    return b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{"


async def deep_json(call, writer):
    return http(b"[" * 60_000)


async def other_object(call, writer):
    return found({"choices": [{"message": {"content": "hello"}}]})


async def no_tokens(call, writer):
    return found({"choices": [{"text": "", "token_ids": []}]})


async def other_ids(call, writer):
    return found({"choices": [{"text": "a", "token_ids": [2048, 2**40, -1]}]})


async def ten_megabytes(call, writer):
    return found({"choices": [{"text": "x" * 10 * MB, "token_ids": [1]}]})


async def endless(call, writer):
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0)


BOMB = gzip.compress(b" " * 20 * MB)


async def gzip_bomb(call, writer):
    return http(BOMB, 200, "content-encoding: gzip\r\n")


async def huge_header(call, writer):
    return b"HTTP/1.1 200 OK\r\nx: " + b"a" * 2 * MB + b"\r\ncontent-length: 2\r\n\r\n{}"


async def silent(call, writer):
    await asyncio.sleep(60)


async def slow_body(call, writer):
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 600\r\n\r\n")
    for _ in range(600):
        writer.write(b" ")
        await asyncio.sleep(0.1)


HOSTILE = {
    status_500: Failure.STATUS,
    status_503: Failure.STATUS,
    status_400: Failure.STATUS,
    redirect: Failure.STATUS,
    empty_body: Failure.CONTENT,
    closed: Failure.CONNECTION,
    no_http: Failure.CONTENT,
    no_json: Failure.CONTENT,
    cut_json: Failure.CONTENT,
    cut_body: Failure.TIMEOUT,
    deep_json: Failure.CONTENT,
    other_object: Failure.CONTENT,
    no_tokens: Failure.TOKENS,
    other_ids: Failure.TOKENS,
    ten_megabytes: Failure.SIZE,
    endless: Failure.SIZE,
    gzip_bomb: Failure.CONTENT,
    huge_header: Failure.CONTENT,
    silent: Failure.TIMEOUT,
    slow_body: Failure.TIMEOUT,
}


@pytest.fixture
async def target():
    async with scripted("target", vocab_size=2048, max_context=2048) as target:
        yield target


@pytest.fixture
async def server():
    async with fake_server() as server:
        yield server


def drafting(redis_server, target, server, **settings):
    settings = {"propose_timeout_s": 0.3, "draft_server": server.url, **settings}
    return running(redis_server, target.address, "", **settings)


def of_gamma(gamma, drafter=SERVER, **fields):
    return request_of(max_tokens=NUM_TOKENS, gamma=GammaPolicy(gamma), drafter=drafter, **fields)


async def plain_tokens(redis_server, target):
    async with running(redis_server, target.address, "") as orchestrator:
        return tokens_of(await complete(orchestrator, of_gamma(0, DrafterKind.MODEL)))


def failures_of(orchestrator):
    return {failure: count for failure, count in orchestrator.draft_server.failures.items() if count}


async def test_good_server_is_accepted_and_changes_no_token(redis_server, target, server):
    plain = await plain_tokens(redis_server, target)
    async with drafting(redis_server, target, server) as orchestrator:
        chunks = await complete(orchestrator, of_gamma(GAMMA))
        assert tokens_of(chunks) == plain
        summary = chunks[-1].summary
        assert summary.server_cycles == summary.cycles == NUM_TOKENS / (GAMMA + 1)
        assert (summary.acceptance_rate, summary.draft_workers) == (1.0, 1)
        (process,) = (process for process in await orchestrator.status() if process.role == "draft")
        assert (process.model, process.healthy, process.kernel) == ("vllm: m", True, "token ids")
        assert not failures_of(orchestrator)
    assert all(call.json["temperature"] == 0 for call in server.calls)


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: answer.__name__)
async def test_hostile_answers_change_no_token_and_are_counted(redis_server, target, server, answer):
    plain = await plain_tokens(redis_server, target)
    async with drafting(redis_server, target, server) as orchestrator:
        server.answer = answer
        chunks = await complete(orchestrator, of_gamma(GAMMA))
        assert tokens_of(chunks) == plain
        summary = chunks[-1].summary
        assert (summary.server_cycles, summary.cycles) == (0, NUM_TOKENS)
        assert summary.fallback_cycles > 0
        assert set(failures_of(orchestrator)) == {HOSTILE[answer]}
        metrics = dict.fromkeys(Failure, 0.0)
        for metric, series in orchestrator.meter.meter.read():
            if metric.name == "gammaray.draft_server.failures":
                metrics = {Failure(labels["reason"]): value() for labels, value in series}
        assert metrics[HOSTILE[answer]] > 0
    assert len(server.calls) < NUM_TOKENS, "a server that fails is paused"


@pytest.mark.parametrize(
    "answer", [status_500, closed, no_json, ten_megabytes, other_ids], ids=lambda answer: answer.__name__
)
async def test_server_that_was_hostile_from_the_start_costs_no_request(redis_server, target, server, answer):
    plain = await plain_tokens(redis_server, target)
    server.answer = answer
    async with drafting(redis_server, target, server) as orchestrator:
        assert tokens_of(await complete(orchestrator, of_gamma(GAMMA))) == plain


@pytest.mark.parametrize(
    "models",
    [
        lambda: http(b"no json"),
        lambda: http(b"", 404),
        lambda: found([]),
        lambda: found({"data": [1, "x", {"id": 7, "owned_by": 8}]}),
        lambda: found({"data": [{"id": "m", "owned_by": "vllm", "max_model_len": "long"}]}),
        lambda: found({"data": [{"id": "m"}] * 500_000}),
        lambda: None,
    ],
)
async def test_any_list_of_models_is_survived(redis_server, target, server, models):
    plain = await plain_tokens(redis_server, target)
    server.models = models
    async with drafting(redis_server, target, server) as orchestrator:
        assert tokens_of(await complete(orchestrator, of_gamma(GAMMA))) == plain
        assert [process.role for process in await orchestrator.status()].count("draft") == 1


async def test_look_ups_go_on_while_the_server_fails(redis_server, target, server):
    async with drafting(redis_server, target, server) as orchestrator:
        plain = tokens_of(await complete(orchestrator, of_gamma(0)))
        server.answer = status_500
        chunks = await complete(orchestrator, of_gamma(GAMMA, DrafterKind.MODEL))
        assert tokens_of(chunks) == plain
        assert chunks[-1].summary.suffix_cycles > 0


async def test_server_that_recovers_drafts_again(redis_server, target, server):
    async with drafting(redis_server, target, server) as orchestrator:
        plain = tokens_of(await complete(orchestrator, of_gamma(0)))
        server.answer = status_500
        await complete(orchestrator, of_gamma(GAMMA))
        server.answer = server.good
        await until(lambda: orchestrator.draft_server.is_usable)
        chunks = await complete(orchestrator, of_gamma(GAMMA))
        assert tokens_of(chunks) == plain
        assert chunks[-1].summary.server_cycles > 0


async def test_death_in_the_middle_of_a_stream_costs_only_speed(redis_server, target, server):
    async with drafting(redis_server, target, server) as orchestrator:
        plain = tokens_of(await complete(orchestrator, of_gamma(0)))
        chunks = []
        async for chunk in orchestrator.generate(of_gamma(GAMMA)):
            chunks.append(chunk)
            if len(chunks) == 2:
                await server.stop()
        summary = chunks[-1].summary
        assert tokens_of(chunks) == plain
        assert 0 < summary.server_cycles < summary.cycles
        assert not orchestrator.draft_server.is_up
        await server.start()
        await until(lambda: orchestrator.draft_server.is_usable)
        chunks = await complete(orchestrator, of_gamma(GAMMA))
        assert tokens_of(chunks) == plain
        assert chunks[-1].summary.server_cycles > 0


async def test_server_that_starts_later_is_found(redis_server, target, server):
    await server.stop()
    async with drafting(redis_server, target, server) as orchestrator:
        (process,) = (process for process in await orchestrator.status() if process.role == "draft")
        assert (process.healthy, process.address) == (False, f"127.0.0.1:{server.port}/v1"[:-3])
        plain = tokens_of(await complete(orchestrator, of_gamma(GAMMA)))
        await server.start()
        await until(lambda: orchestrator.draft_server.is_usable)
        chunks = await complete(orchestrator, of_gamma(GAMMA))
        assert tokens_of(chunks) == plain
        assert chunks[-1].summary.server_cycles > 0


async def test_disconnect_of_the_client_closes_the_call(redis_server, target, server):
    async with drafting(redis_server, target, server, propose_timeout_s=60.0) as orchestrator:
        server.answer = silent
        task = asyncio.create_task(complete(orchestrator, of_gamma(GAMMA)))
        await until(lambda: len(server.calls) == 2)  # the first one compared vocabularies
        assert server.num_closed == 0
        task.cancel()
        await until(lambda: server.num_closed == 1)
        await asyncio.gather(task, return_exceptions=True)


async def test_late_call_is_closed(redis_server, target, server):
    async with drafting(redis_server, target, server, propose_timeout_s=0.1) as orchestrator:
        server.answer = silent
        await complete(orchestrator, of_gamma(GAMMA))
        await until(lambda: server.num_closed == len(server.calls) - 1)


async def test_proposals_end_with_the_context_of_the_server(redis_server, target, server):
    server.max_model_len = 21
    async with drafting(redis_server, target, server) as orchestrator:
        plain = tokens_of(await complete(orchestrator, of_gamma(0)))
        chunks = await complete(orchestrator, of_gamma(GAMMA))
        assert tokens_of(chunks) == plain
        assert not failures_of(orchestrator)
    assert max(len(call.json["prompt"]) + call.json["max_tokens"] for call in server.calls[1:]) == 21


@pytest.mark.parametrize("method", [VerificationMethod.REJECTION, VerificationMethod.BLOCK])
@pytest.mark.parametrize("drafter", [DrafterKind.MODEL, SERVER])
async def test_rejection_is_refused_with_the_reason(redis_server, target, server, drafter, method):
    rejection = {"verification": method}
    async with drafting(redis_server, target, server) as orchestrator:
        with pytest.raises(InvalidArgumentError, match="sends no draft distribution") as caught:
            await complete(orchestrator, of_gamma(GAMMA, drafter, **rejection))
        assert caught.value.field == "verification"
        greedy = SamplingParams(temperature=0.0, seed=1)
        chunks = await complete(orchestrator, of_gamma(GAMMA, drafter, sampling=greedy, **rejection))
        assert chunks[-1].summary.server_cycles > 0
        chunks = await complete(orchestrator, of_gamma(GAMMA, DrafterKind.SUFFIX, **rejection))
        assert chunks[-1].summary.server_cycles == 0


async def test_cluster_without_a_server_refuses_requests_for_one(redis_server, target):
    async with running(redis_server, target.address, "") as orchestrator:
        with pytest.raises(InvalidArgumentError, match="drafter: got server, allowed: another drafter"):
            await complete(orchestrator, of_gamma(GAMMA))


async def test_key_is_sent_and_never_logged(redis_server, target, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "key"
    file.write_text("hunter2-wrong\n")
    async with fake_server(key="hunter2") as server:
        async with drafting(redis_server, target, server, draft_key_file=str(file)) as orchestrator:
            assert not orchestrator.draft_server.is_up
            file.write_text("hunter2\n")  # a changed key is read without a restart
            await until(lambda: orchestrator.draft_server.is_usable)
            chunks = await complete(orchestrator, of_gamma(GAMMA))
            assert chunks[-1].summary.server_cycles > 0
    assert "status 401" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("content", [None, b"", b"two\nlines", b"\xff\xfe", "schlüssel".encode()])
async def test_key_file_without_a_key_stops_the_start(redis_server, target, tmp_path, content):
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    settings = OrchestratorSettings(
        redis_url=redis_server.url, draft_server="openai:http://127.0.0.1:1", draft_key_file=str(file)
    )
    with pytest.raises(InvalidArgumentError, match="draft_key_file") as caught:
        await Orchestrator.start(settings)
    assert "lines" not in str(caught.value)


@pytest.mark.parametrize("knows_ca", [True, False])
async def test_certificate_of_the_server_is_verified(redis_server, target, tmp_path, knows_ca):
    files = role_certificates(Authority(tmp_path, "ca"))["server"]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    async with fake_server(ssl_context=context) as server:
        given = {"draft_ca_file": str(files.ca)} if knows_ca else {}
        async with drafting(redis_server, target, server, **given) as orchestrator:
            assert orchestrator.draft_server.is_up is knows_ca
    assert bool(server.calls) is knows_ca


async def test_failures_are_logged_once_in_a_while(redis_server, target, server, caplog):
    async with drafting(redis_server, target, server) as orchestrator:
        server.answer = no_json
        for _ in range(4):
            await complete(orchestrator, of_gamma(GAMMA))
            orchestrator.draft_server.backoff.succeeded()
        assert failures_of(orchestrator)[Failure.CONTENT] >= 4
    warnings = [record for record in caplog.records if "does not draft" in record.getMessage()]
    assert len(warnings) == 1


async def records_of(orchestrator, request):
    return list((await orchestrator.sessions.trace(request.session_id, ANONYMOUS)).cycles)


async def test_failure_is_in_the_trace(redis_server, target, server):
    async with drafting(redis_server, target, server) as orchestrator:
        server.answer = status_500
        request = of_gamma(GAMMA)
        await complete(orchestrator, request)
        records = await until_so(lambda: records_of(orchestrator, request))
    failed = [record for record in records if record.HasField("draft")]
    assert failed
    assert all(record.draft.error == "DraftServerError" for record in failed)
    assert failed[0].draft.address == f"127.0.0.1:{server.port}"
    assert failed[0].draft.request_bytes > 0
