"""Clients that stop reading a stream: their place is given back, and others are served meanwhile."""

import asyncio
import contextlib
import json
from unittest.mock import Mock

import grpc
import pytest

from gammaray.types import EmittedToken, FinishReason, TokenOrigin
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.v1 import generation_service_pb2_grpc as rpc
from orchestrator.access.admission import Admission
from orchestrator.access.caller import ANONYMOUS
from orchestrator.api import stalls
from orchestrator.api.grpc_servicer import GenerationServicer
from orchestrator.api.http.server.app import create_app
from orchestrator.api.stalls import while_read
from tests.support.http_helpers import listening
from tests.support.sdk_helpers import serve
from tests.support.surface_helpers import ScriptedBackend
from tests.support.workers.scripted_workers import until

TEXT = "x" * 2**16
WAIT_S = 30.0


class EndlessBackend(ScriptedBackend):
    """Has one place; its streams are longer than what the buffers up to a client hold."""

    def __init__(self):
        super().__init__()
        self.admission = Admission(1, 8, WAIT_S)

    async def generate(self, request, caller=ANONYMOUS):
        chunks = super().generate(request, caller)
        async with self.admission.place(caller), contextlib.aclosing(chunks):
            async for chunk in chunks:
                if request.max_tokens < 100:
                    yield chunk
                    continue
                for _ in range(2000):
                    token = EmittedToken(1, TokenOrigin.BONUS, b"x")
                    await asyncio.sleep(0)
                    yield type(chunk)(chunk.session_id, text=TEXT, tokens=(token,), seed=0)
                yield chunk


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch):
    monkeypatch.setattr(stalls, "READ_TIMEOUT_S", 0.2)


async def read_all(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_generation_that_takes_long_between_pieces_is_not_ended():
    async def generation():
        for number in range(3):
            await asyncio.sleep(0.5)
            yield number

    assert [number async for number in while_read(generation())] == [0, 1, 2]


async def test_unread_grpc_stream_gives_its_place_back():
    backend = EndlessBackend()
    servicer = GenerationServicer(backend)
    methods = Mock(Generate=servicer.generate, GetStatus=servicer.get_status)
    channel = grpc.aio.insecure_channel
    async with serve(methods) as address, channel(address) as idle, channel(address) as other:
        unread = rpc.GenerationServiceStub(idle).Generate(pb.GenerateRequest(text="a", max_tokens=100))
        await unread.read()
        stub = rpc.GenerationServiceStub(other)
        waiting = stub.Generate(pb.GenerateRequest(text="a", max_tokens=3), timeout=WAIT_S)
        assert (await stub.GetStatus(pb.GetStatusRequest(), timeout=WAIT_S)).processes
        chunks = [chunk async for chunk in waiting]
        assert sum(len(chunk.tokens) for chunk in chunks) == 3
        assert unread.done() is False
        with pytest.raises(grpc.RpcError) as ended:
            await read_all(unread)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: backend.admission.num_running == 0)


async def asked(url, path, body):
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 100}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 100, "n": 2}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 100}),
    ],
    ids=["one", "several", "response"],
)
async def test_unread_http_stream_gives_its_place_back(path, body):
    backend = EndlessBackend()
    backend.max_context = 1000
    async with listening(create_app(backend)) as url:
        reader, writer = await asked(url, path, {**body, "stream": True})
        await reader.readexactly(10)
        served, other = await asked(url, "/v1/completions", {"prompt": "a", "max_tokens": 3})
        answer = await asyncio.wait_for(served.read(), WAIT_S)
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        assert FinishReason.LENGTH.value.encode() in answer
        rest = await asyncio.wait_for(reader.read(), WAIT_S)
        assert b"was not read for" in rest
        await until(lambda: backend.admission.num_running == 0)
        for stream in (writer, other):
            stream.close()
