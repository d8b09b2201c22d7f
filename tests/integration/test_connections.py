"""Worker connections against scripted gRPC servers: batching, deadlines, failure, reconnect, rejection."""

import asyncio
import time
from contextlib import asynccontextmanager

import grpc
import pytest

from gammaray.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.v1 import types_pb2 as pb
from orchestrator.workers import connection as links
from orchestrator.workers.connection import WorkerConnection
from orchestrator.workers.protocol import TARGET
from tests.support.workers.scripted_workers import scripted, until

pytestmark = pytest.mark.integration


def accept(info):
    return None


@asynccontextmanager
async def link_to(address: str, check=accept):
    link = WorkerConnection(TARGET, address, check=check, on_change=lambda: None)
    link.start()
    try:
        yield link
    finally:
        await link.close()


@pytest.fixture
async def pair():
    """A scripted target worker, and a link to it that is up."""
    async with scripted("target") as worker, link_to(worker.address) as link:
        await until(lambda: link.is_up)
        yield worker, link


def block(session_id: str = "s", base: int = 1) -> target_pb.VerifyBlock:
    return target_pb.VerifyBlock(
        session_id=session_id,
        epoch=1,
        base_position=base,
        context=pb.TokenSpan(start=0, token_ids=[1] * base),
        spec=pb.SessionSpec(),
    )


async def test_link_calls_of_one_tick_leave_in_one_frame(pair):
    worker, link = pair
    results = await asyncio.gather(*(link.call(block(f"s{i}", i + 1), 30) for i in range(40)))
    assert [r.session_id for r in results] == [f"s{i}" for i in range(40)]
    assert len({r.request_id for r in results}) == 40
    assert len(worker.frames) == 1
    assert worker.num_streams == 1


async def test_link_large_blocks_are_spread_over_frames(pair):
    worker, link = pair
    await asyncio.gather(*(link.call(block(f"s{i}", 400_000), 30) for i in range(6)))
    assert max(frame.ByteSize() for frame in worker.frames) < 2 * links.MAX_FRAME_BYTES
    assert len(worker.blocks) == 6


async def test_link_answers_in_any_order_reach_their_callers(pair):
    worker, link = pair
    kept = []

    def all_at_once(b):
        kept.append(b)
        stray = target_pb.VerifyResult(request_id=10**9)
        return [stray, *(worker.work(b) for b in reversed(kept))] if len(kept) == 3 else None

    worker.on_block = all_at_once
    calls = []
    for i in range(3):
        calls.append(asyncio.create_task(link.call(block(f"s{i}"), 30)))
        await until(lambda: len(kept) == len(calls))
    assert [r.session_id for r in await asyncio.gather(*calls)] == ["s0", "s1", "s2"]


async def test_link_silent_worker_fails_the_call_at_its_deadline(pair):
    worker, link = pair
    worker.on_block = lambda b: None if b.session_id == "silent" else worker.work(b)
    start = time.monotonic()
    silent = asyncio.create_task(link.call(block("silent"), 0.3))
    assert (await link.call(block("other"), 30)).session_id == "other"
    with pytest.raises(DeadlineExceededError, match=r"no answer within 0\.3 s"):
        await silent
    assert 0.3 <= time.monotonic() - start < 20
    assert link.is_up
    assert not link.pending
    worker.delay_s = 0.5
    with pytest.raises(DeadlineExceededError):
        await link.call(block("late"), 0.01)
    worker.delay_s = 0.0
    assert (await link.call(block("next"), 30)).session_id == "next", "the late answer is dropped"


async def test_link_worker_dies_pending_calls_fail_and_it_reconnects(pair):
    worker, link = pair
    worker.on_block = lambda b: None
    calls = [asyncio.create_task(link.call(block(f"s{i}"), 30)) for i in range(3)]
    await until(lambda: len(worker.blocks) == 3)
    await worker.stop()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, UnavailableError)
        assert worker.address in str(result)
    await until(lambda: not link.is_up)
    with pytest.raises(UnavailableError, match="not connected"):
        await link.call(block(), 30)
    worker.on_block = worker.work
    await worker.start()
    await until(lambda: link.is_up)
    assert (await link.call(block("back"), 30)).session_id == "back"


async def test_link_survives_a_message_that_cannot_be_parsed():
    num_streams = 0

    async def info(_request, _context):
        return target_pb.GetTargetInfoResponse().SerializeToString()

    async def verify(requests, _context):
        nonlocal num_streams
        num_streams += 1
        if num_streams == 1:
            yield b"\xff\xff\xff"
        async for _ in requests:
            pass

    handlers = {
        "GetTargetInfo": grpc.unary_unary_rpc_method_handler(info),
        "Verify": grpc.stream_stream_rpc_method_handler(verify),
    }
    server = grpc.aio.server()
    service = "gammaray.v1.TargetService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with link_to(f"127.0.0.1:{port}") as link:
            await until(lambda: num_streams == 2 and link.is_up)
    finally:
        await server.stop(0)


async def test_link_fails_calls_of_a_stuck_worker_before_the_deadline(monkeypatch):
    monkeypatch.setattr(links, "INFO_PERIOD_S", 0.1)
    monkeypatch.setattr(links, "INFO_TIMEOUT_S", 0.3)
    async with scripted("target") as worker, link_to(worker.address) as link:
        await until(lambda: link.is_up)
        worker.runs.clear()
        start = time.monotonic()
        with pytest.raises(UnavailableError):
            await link.call(block(), 60)
        assert time.monotonic() - start < 30
        worker.runs.set()
        await until(lambda: link.is_up)


async def test_link_does_not_use_a_refused_worker_until_it_is_accepted():
    wrong = [True]

    def check(info):
        if wrong[0]:
            raise InvalidArgumentError("draft", info.vocab_size, "2048")

    async with scripted("target") as worker, link_to(worker.address, check) as link:
        await until(lambda: link.refusal is not None)
        assert not link.is_up
        assert "2048" in str(link.refusal)
        wrong[0] = False
        await until(lambda: link.is_up)
        assert link.refusal is None


async def test_link_close_fails_what_is_in_flight(pair):
    worker, link = pair
    worker.on_block = lambda b: None
    call = asyncio.create_task(link.call(block(), 60))
    await until(lambda: len(worker.blocks) == 1)
    await link.close()
    with pytest.raises(UnavailableError, match="closed the link"):
        await call
