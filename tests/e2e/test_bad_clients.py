"""Clients that disconnect, and input that proxies could cut or hide: no session is left.

Wrong values of fields are tested in tests/unit/orchestrator/api/http/test_http_errors.py.
"""

import asyncio
from contextlib import suppress

import grpc
import httpx
import pytest

from gammaray import AsyncClient
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.v1 import generation_service_pb2_grpc as pb_grpc
from gammaray.wire.rpc_errors import error_from_rpc
from gammaray.wire.sessions import SessionState

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

NUM_STREAMS = 40  # a proxy that loses one cancellation in four passes a test of a few by luck
LONG = {"max_tokens": 1500, "ignore_eos": True}
SLOW = {**LONG, "gamma": {"fixed": 0}}
"""What must not be over before it is looked at."""


async def test_cancelled_calls_free_the_workers(cluster):
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)

        async def cancel_after(num_chunks):
            call = stub.Generate(pb.GenerateRequest(text="import ", **LONG), timeout=120)
            for _ in range(num_chunks):
                assert await call.read() is not grpc.aio.EOF
            call.cancel()

        witness = stub.Generate(pb.GenerateRequest(text="import ", **SLOW), timeout=120)
        assert await witness.read() is not grpc.aio.EOF
        held = await asyncio.to_thread(cluster.sessions)
        assert held["orchestrator"] == held["target"] == 1
        await asyncio.gather(*(cancel_after(number % 4) for number in range(NUM_STREAMS)))
        witness.cancel()
    await asyncio.to_thread(cluster.wait_until_idle)


@pytest.mark.parametrize("size", [0, 40_000], ids=["small", "larger-than-the-proxy's-buffer"])
@pytest.mark.parametrize("stream", [True, False])
async def test_closed_http_connections_free_the_workers(cluster, stream, size):
    async def vanish(http, name):
        options = {"session_id": name, "gamma": 0}
        body = {"prompt": "import ", "stream": stream, "gammaray": options, "user": "x" * size, **LONG}
        with suppress(httpx.ReadTimeout):
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        break

    names = [f"vanished-{stream}-{size}-{number}" for number in range(NUM_STREAMS if stream else 8)]
    timeout = httpx.Timeout(60, read=60 if stream else 0.5)
    async with httpx.AsyncClient(base_url=cluster.http, timeout=timeout) as http:
        await asyncio.gather(*(vanish(http, name) for name in names))
    await asyncio.to_thread(cluster.wait_until_idle)
    async with AsyncClient(cluster.grpc) as client:
        states = [(await client.get_session(name))[0].state for name in names]
    assert states == [SessionState.DETACHED] * len(names)  # none has run to its end


TEXT = "x" * 10_000_000


def test_large_http_request_gets_an_error_object(cluster):
    answer = httpx.post(f"{cluster.http}/v1/completions", json={"prompt": TEXT}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (413, "invalid_request_error")
    assert 0 < len(error["message"]) < 500


def test_large_call_names_the_field_in_its_details(cluster):
    request = pb.GenerateRequest(text=TEXT).SerializeToString()
    with grpc.insecure_channel(cluster.grpc) as channel:
        generate = channel.unary_stream("/gammaray.v1.GenerationService/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(generate(request, timeout=60))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_from_rpc(caught.value).field == "prompt"
