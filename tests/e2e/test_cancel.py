"""Clients that disconnect: the generation ends, and the workers' caches are freed."""

import asyncio
import json

import grpc
import pytest

from gammaray import AsyncClient
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.v1 import generation_service_pb2_grpc as pb_grpc
from gammaray.wire.sessions import SessionState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

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
    host, port = cluster.http.removeprefix("http://").split(":")

    def request(name):
        options = {"session_id": name, "gamma": 0}
        fields = {"prompt": "import ", "stream": stream, "gammaray": options, "user": "x" * size, **LONG}
        body = json.dumps(fields).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def vanish(name):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request(name))
        await writer.drain()
        if stream:
            await reader.readuntil(b"data: ")
        else:
            await asyncio.sleep(0.5)
        writer.close()

    names = [f"vanished-{stream}-{size}-{number}" for number in range(NUM_STREAMS if stream else 8)]
    await asyncio.gather(*map(vanish, names))
    await asyncio.to_thread(cluster.wait_until_idle)
    async with AsyncClient(cluster.grpc) as client:
        states = [(await client.get_session(name))[0].state for name in names]
    assert states == [SessionState.DETACHED] * len(names)  # none has run to its end
