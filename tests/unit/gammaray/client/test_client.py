"""AsyncClient against a real gRPC server: streaming, completions, cancellation, deadlines, readiness."""

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from gammaray import (
    AsyncClient,
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    ProcessStatus,
    RetryPolicy,
    UnauthenticatedError,
    UnavailableError,
)
from tests.support.sdk_helpers import (
    NO_RETRY,
    PROCESSES,
    SUMMARY,
    USAGE,
    ScriptedService,
    answer,
    endless,
    happens,
    last,
    piece,
    serve,
    silent,
    token,
)


async def test_calls_carry_the_application_and_the_key():
    service = ScriptedService()
    async with serve(service) as address:
        async with AsyncClient(address, api_key="secret") as client:
            await client.complete("Hi")
            await client.status()
        async with AsyncClient(address) as client:
            await client.status()
    assert [call["application"] for call in service.metadata] == ["gammaray"] * 3
    assert [call.get("authorization") for call in service.metadata] == ["Bearer secret"] * 2 + [None]


async def test_server_of_this_machine_is_called_past_the_proxy(monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serve(ScriptedService()) as address, AsyncClient(address, retry=NO_RETRY) as client:
        assert await client.status() == PROCESSES


async def test_calls_send_their_timeout():
    service = ScriptedService()
    async with serve(service) as address, AsyncClient(address, timeout_s=20) as client:
        await client.complete("Hi")
        await client.complete("Hi", timeout_s=2.5)
        await client.complete("Hi", timeout_s=1e9)
    reported = [int(call["gammaray-timeout-ms"]) for call in service.metadata]
    assert 19_000 < reported[0] <= 20_000
    assert 1500 < reported[1] <= 2500
    assert reported[2] == 7 * 24 * 3600 * 1000


async def test_complete_joins_text_and_tokens():
    tokens = (token("Hello"), token(" world", token_id=8))
    service = ScriptedService(answer(piece("Hello", tokens[0]), last(" world", tokens[1])))
    async with serve(service) as address, AsyncClient(address) as client:
        completion = await client.complete("Hi")
    assert completion.text == "Hello world"
    assert completion.tokens == tokens
    assert (completion.finish_reason.value, completion.seed, completion.session_id) == ("stop", 9, "s1")
    assert (completion.usage, completion.summary) == (USAGE, SUMMARY)


async def test_generate_message_above_grpcs_default_limit_arrives():
    text = "x" * (5 * 2**20)
    async with serve(ScriptedService(answer(last(text, token("x"))))) as address:
        async with AsyncClient(address) as client:
            assert (await client.complete("Hi")).text == text


@pytest.mark.parametrize("behaviour", [endless, silent], ids=["between chunks", "before the first"])
async def test_generate_cancelled_task_cancels_on_the_server(behaviour):
    service = ScriptedService(behaviour)
    async with serve(service) as address, AsyncClient(address) as client:
        task = asyncio.create_task(client.complete("Hi"))
        assert await happens(service.arrived)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await happens(service.cancelled)


async def test_generate_closed_client_raises_cancelled():
    service = ScriptedService(endless)
    async with serve(service) as address:
        client = AsyncClient(address)
        chunks = client.generate("Hi")
        await anext(chunks)
        await client.close()
        with pytest.raises(CancelledError):
            async for _ in chunks:
                pass
    assert len(service.requests) == 1


@dataclass(frozen=True)
class ToldRetry(RetryPolicy):
    """Tells when a call waits for its next attempt."""

    waits: asyncio.Event = field(default_factory=asyncio.Event)

    def delay_s(self, attempt):
        self.waits.set()
        return 0.1


@pytest.mark.parametrize("method", ["complete", "status", "wait_ready"])
async def test_client_that_is_closed_while_a_call_waits_to_retry_raises_cancelled(method):
    retry = ToldRetry()
    client = AsyncClient("127.0.0.1:1", retry=retry)
    call = asyncio.create_task(client.complete("Hi") if method == "complete" else getattr(client, method)())
    await asyncio.wait_for(retry.waits.wait(), 30)
    await client.close()
    with pytest.raises(CancelledError, match="the client was closed"):
        await asyncio.wait_for(call, 30)


@pytest.mark.parametrize("per_call", [True, False], ids=["of the call", "of the client"])
async def test_generate_deadline_ends_the_call_on_both_sides(per_call):
    service = ScriptedService(silent)
    client_s, call_s = (600.0, 1.0) if per_call else (1.0, None)
    async with serve(service) as address, AsyncClient(address, timeout_s=client_s) as client:
        await client.status()  # the time is not for connecting
        started = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            await client.complete("Hi", timeout_s=call_s)
        assert 0.9 <= time.monotonic() - started < 60
        assert await happens(service.cancelled)


async def test_wait_ready_cluster_that_starts_returns_when_a_target_is_healthy():
    def starting(attempt):
        if attempt == 0:
            raise UnavailableError("no replica yet")
        return [ProcessStatus("target", 1, "", "demo", attempt >= 2, 0)]

    service = ScriptedService(status=starting)
    async with serve(service) as address, AsyncClient(address, retry=NO_RETRY) as client:
        processes = await client.wait_ready(60)
    assert [process.healthy for process in processes] == [True]
    assert service.num_status_calls == 3


async def test_wait_ready_missing_role_times_out_and_names_it():
    async with serve(ScriptedService()) as address, AsyncClient(address) as client:
        with pytest.raises(DeadlineExceededError, match=r"not ready after 1 s: no healthy draft"):
            await client.wait_ready(1, roles=("target", "draft"))


async def test_wait_ready_without_a_server_times_out():
    async with AsyncClient("127.0.0.1:1") as client:
        started = time.monotonic()
        with pytest.raises(DeadlineExceededError, match="not ready"):
            await client.wait_ready(0.3)
        assert time.monotonic() - started < 20


async def test_wait_ready_refused_key_raises_at_once():
    def refuse_key(attempt):
        raise UnauthenticatedError("no valid API key")

    async with serve(ScriptedService(status=refuse_key)) as address, AsyncClient(address) as client:
        with pytest.raises(UnauthenticatedError, match="no valid API key"):
            await client.wait_ready(10)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"address": ""}, "address"),
        ({"api_key": ""}, "api_key"),
        ({"api_key": "a\nb"}, "api_key"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"timeout_s": "10"}, "timeout_s"),
    ],
)
def test_client_bad_argument_raises(arguments, field):
    with pytest.raises(InvalidArgumentError) as caught:
        AsyncClient(**{"address": "127.0.0.1:9000", **arguments})
    assert caught.value.field == field


@pytest.mark.slow
async def test_status_that_a_proxy_never_passes_on_is_asked_for_again():
    service = ScriptedService(num_hung_status_calls=1)
    async with serve(service) as address, AsyncClient(address) as client:
        assert await client.status(timeout_s=4) == PROCESSES
    assert service.num_status_calls == 2
