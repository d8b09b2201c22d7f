"""Servers with an HTTP API that draft: one that answers as it is told to, and a second gammaray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvicorn

from gammaray.demo_pair import resolve_model
from orchestrator.api.http.server.app import create_app
from orchestrator.text.tokenizer import Tokenizer
from tests.support.workers.scripted_workers import next_token, until


@dataclass
class Call:
    """A call that a fake server received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


def http(body: bytes, status: int = 200, headers: str = "") -> bytes:
    """Return an HTTP answer."""
    head = (
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}"
    )
    return f"{head}\r\n".encode() + body


def found(value: object) -> bytes:
    return http(json.dumps(value).encode())


@dataclass
class FakeServer:
    """A server of vLLM's dialect; what it answers is set by the test.

    It proposes what the scripted target emits, so that its proposals are accepted.

    Attributes:
        answer: Returns the bytes of the answer to a completion, or None to close the connection; may also
            write to the connection itself.
        models: Returns the same for the list of models.
        calls: The received completions.
        num_closed: Connections that the client closed during a completion.
    """

    key: str = ""
    calls: list[Call] = field(default_factory=list)
    num_closed: int = 0
    port: int = 0
    ssl_context: object = None
    max_model_len: int | None = None

    def __post_init__(self):
        self.tokenizer = Tokenizer(resolve_model("demo", "target"))
        self.answer: Callable[[Call, asyncio.StreamWriter], Awaitable[bytes | None]] = self.good
        self.models: Callable[[], bytes | None] = self.good_models
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task] = set()

    @property
    def url(self) -> str:
        scheme = "http" if self.ssl_context is None else "https"
        return f"openai:{scheme}://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        """Serve; on the same port as before when it was stopped."""
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, ssl=self.ssl_context, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the port and break every connection, as the death of a process does."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def good_models(self) -> bytes:
        return found({"data": [{"id": "m", "owned_by": "vllm", "max_model_len": self.max_model_len}]})

    async def good(self, call: Call, writer: asyncio.StreamWriter) -> bytes:
        """Answer as vLLM does."""
        tokens = list(call.json["prompt"])
        chain: list[int] = []
        while len(chain) < call.json["max_tokens"]:
            chain.append(next_token([*tokens, *chain]))
        choice = {"text": self.tokenizer.decode(chain), "token_ids": chain, "finish_reason": "length"}
        return found({"choices": [choice]})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (call := await _read_call(reader)) is not None:
                if self.key and call.headers.get("authorization") != f"Bearer {self.key}":
                    answer = http(call.headers.get("authorization", "").encode(), 401)
                elif call.method == "GET":
                    answer = self.models()
                else:
                    self.calls.append(call)
                    answer = await self._complete(call, reader, writer)
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _complete(self, call, reader, writer) -> bytes | None:
        """Return the answer, unless the client closes the connection first."""
        answering = asyncio.ensure_future(self.answer(call, writer))
        closing = asyncio.ensure_future(reader.read(1))
        done, _ = await asyncio.wait({answering, closing}, return_when=asyncio.FIRST_COMPLETED)
        if answering in done:
            closing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await closing
            return answering.result()
        self.num_closed += 1
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        return None


async def _read_call(reader: asyncio.StreamReader) -> Call | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    except asyncio.IncompleteReadError:
        return None
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Call(method, path, headers, body)


@asynccontextmanager
async def fake_server(**fields):
    server = FakeServer(**fields)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


class Served:
    """The HTTP API of an orchestrator on a port of this machine, served by uvicorn in this process.

    Attributes:
        port: The port.
    """

    def __init__(self, orchestrator, port: int = 0) -> None:
        self._orchestrator, self.port = orchestrator, port
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task | None = None

    @property
    def url(self) -> str:
        return f"openai:http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Serve; on the same port as before when it was stopped."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        app = create_app(self._orchestrator, close=self._orchestrator.close)
        # Without a lifespan the orchestrator stays open: the test closes it.
        config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        server = self._server
        await until(lambda: server.started)

    async def stop(self) -> None:
        """Close the port and break every connection, as the death of a process does."""
        if self._server is not None and self._task is not None:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            self._server.force_exit = self._server.should_exit = True
            await self._task
            self._server = None


@asynccontextmanager
async def served(orchestrator):
    api = Served(orchestrator)
    await api.start()
    try:
        yield api
    finally:
        await api.stop()
