"""A real gRPC server whose answers are plain functions, and chunks to answer with."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import grpc
from grpc_status import rpc_status

from gammaray import __version__
from gammaray.client.transport import RetryPolicy
from gammaray.errors import GammarayError
from gammaray.types import (
    Chunk,
    EmittedToken,
    FinishReason,
    ProcessStatus,
    SpeculationSummary,
    TokenOrigin,
    Usage,
)
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.v1.generation_service_pb2_grpc import (
    GenerationServiceServicer,
    add_GenerationServiceServicer_to_server,
)
from gammaray.wire.convert import chunk_to_proto, process_to_proto
from gammaray.wire.rpc_errors import error_to_status

WAIT_S = 120.0
NO_RETRY = RetryPolicy(max_attempts=1)
FAST_RETRY = RetryPolicy(max_attempts=4, initial_delay_s=0.01)

SUMMARY = SpeculationSummary(
    **{"cycles": 3, "tokens_per_cycle": 2.0, "alpha": 0.75, "acceptance_rate": 0.5, "gamma_mean": 2.5},
    **{"accepted_lengths": (1, 1, 1), "drafted_tokens": 6, "accepted_tokens": 3},
    **{"draft_ms": 10.0, "verify_ms": 30.0, "other_ms": 10.0, "total_ms": 50.0, "speedup_estimate": 1.5},
)
USAGE = Usage(
    **{"prompt_tokens": 4, "completion_tokens": 6, "cached_tokens": 2},
    **{"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1},
)
PROCESSES = [
    ProcessStatus(
        *("orchestrator", 11, "127.0.0.1:1", "demo", True, 2),
        version=__version__,
        unusable=("target 127.0.0.1:9: Connection refused",),
    ),
    ProcessStatus(
        "target", 12, "127.0.0.1:2", "demo", True, 2, kernel="x86-64-v4", version="0.0.9", clock_offset_s=7.25
    ),
    ProcessStatus("draft", 13, "127.0.0.1:3", "demo", False, 0, kernel="none: no C compiler"),
]

GenerateBehaviour = Callable[[pb.GenerateRequest, int], AsyncIterator[Chunk]]
StatusBehaviour = Callable[[int], Sequence[ProcessStatus]]


def token(
    data: bytes | str, origin: TokenOrigin = TokenOrigin.ACCEPTED, token_id: int = 7, **fields: object
) -> EmittedToken:
    return EmittedToken(token_id, origin, data.encode() if isinstance(data, str) else data, **fields)


def piece(text: str, *tokens: EmittedToken) -> Chunk:
    """Return a chunk in the middle of a completion; one token spells its text unless others are given."""
    return Chunk("s1", text, tokens or (token(text),), seed=9)


def last(text: str, *tokens: EmittedToken) -> Chunk:
    return Chunk("s1", text, tokens or (token(text),), 9, FinishReason.STOP, USAGE, SUMMARY)


def numbered(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return chunks with their offsets, as the service sends them."""
    starts = itertools.accumulate((len(chunk.tokens) for chunk in chunks), initial=0)
    return [replace(chunk, offset=start) for chunk, start in zip(chunks, starts, strict=False)]


def answer(*chunks: Chunk) -> GenerateBehaviour:
    async def behaviour(request: pb.GenerateRequest, attempt: int) -> AsyncIterator[Chunk]:
        for chunk in chunks:
            yield chunk

    return behaviour


def refuse(error: GammarayError, *before: Chunk) -> GenerateBehaviour:
    """Fail every request, after these chunks."""

    async def behaviour(request: pb.GenerateRequest, attempt: int) -> AsyncIterator[Chunk]:
        for chunk in before:
            yield chunk
        raise error

    return behaviour


async def endless(request: pb.GenerateRequest, attempt: int) -> AsyncIterator[Chunk]:
    """Stream until the client goes away."""
    while True:
        yield piece("x")
        await asyncio.sleep(0.005)


async def silent(request: pb.GenerateRequest, attempt: int) -> AsyncIterator[Chunk]:
    await asyncio.sleep(3600)
    yield piece("too late")


class ScriptedService(GenerationServiceServicer):
    """Answers with a function; keeps requests and metadata; tells what `arrived` and was `cancelled`."""

    def __init__(
        self,
        generate: GenerateBehaviour | None = None,
        status: StatusBehaviour = lambda attempt: PROCESSES,
        num_hung_status_calls: int = 0,
    ) -> None:
        self._generate = generate or answer(last("done"))
        self._status = status
        self._num_hung_status_calls = num_hung_status_calls
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.num_status_calls = 0
        self.arrived = threading.Event()
        self.cancelled = threading.Event()

    async def Generate(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.arrived.set()
        ended = False
        try:
            offset = request.resume_from
            async for chunk in self._generate(request, len(self.requests) - 1):
                yield chunk_to_proto(replace(chunk, offset=offset))
                offset += len(chunk.tokens)
            ended = True
        except GammarayError as error:
            ended = True
            await context.abort_with_status(rpc_status.to_status(error_to_status(error)))
        finally:
            # Cancelled while it slept, or by a write that was not read any more: gRPC distinguishes the two.
            if not ended:
                self.cancelled.set()

    async def GetStatus(self, request, context):
        self.metadata.append(dict(context.invocation_metadata()))
        self.num_status_calls += 1
        if self.num_status_calls <= self._num_hung_status_calls:
            await asyncio.sleep(3600)
        try:
            processes = self._status(self.num_status_calls - 1)
        except GammarayError as error:
            await context.abort_with_status(rpc_status.to_status(error_to_status(error)))
        return pb.GetStatusResponse(processes=[process_to_proto(process) for process in processes])


async def happens(event: threading.Event) -> bool:
    return await asyncio.to_thread(event.wait, WAIT_S)


@asynccontextmanager
async def serve(
    servicer: GenerationServiceServicer, port: int = 0, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[str]:
    """Serve in this event loop, with TLS where there are credentials; yields host:port."""
    server = grpc.aio.server()
    add_GenerationServiceServicer_to_server(servicer, server)
    place = f"127.0.0.1:{port}"
    if credentials is None:
        bound = server.add_insecure_port(place)
    else:
        bound = server.add_secure_port(place, credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(None)


@contextmanager
def serve_in_thread(
    servicer: GenerationServiceServicer, credentials: grpc.ServerCredentials | None = None
) -> Iterator[str]:
    """Serve in an event loop of another thread, for blocking clients; yields host:port."""
    started, addresses = threading.Event(), []
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        async with serve(servicer, credentials=credentials) as address:
            addresses.append(address)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert started.wait(WAIT_S)
    try:
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)
        loop.close()
