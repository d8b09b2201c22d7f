"""Connections to scripted workers, and fleets of them: joining, leaving, refusals, deadlines."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from gammaray.blocks import OLDEST_PROTOCOL, PROTOCOL
from gammaray.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.v1 import types_pb2 as pb
from orchestrator.workers import connection as links
from orchestrator.workers.connection import WorkerConnection
from orchestrator.workers.protocol import TARGET
from tests.support.workers.fleet_helpers import ListRegistry, clients, emitted, fleet_of
from tests.support.workers.scripted_workers import PROMPT, continuation, finish, make_session, scripted, until

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("target", "draft", "sha", "wanted"),
    [
        ({"sha": "same"}, {"vocab_size": 49}, "", r"draft with 49 token ids.*target's 50"),
        ({"sha": "same"}, {"sha": "other"}, "", r"50 token ids mean other tokens.*50 token ids"),
        ({"vocab_size": 51}, None, "", r"51 token ids.*50"),
        ({"sha": "other"}, None, "own", r"target: got .*50 token ids mean other tokens"),
        ({}, {"sha": "other"}, "own", r"draft: got .*mean other tokens"),
    ],
)
async def test_fleet_worker_of_another_vocabulary_fails_the_start(target, draft, sha, wanted):
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(scripted("target", **target))]
        if draft is not None:
            workers.append(await stack.enter_async_context(scripted("draft", **draft)))
        with pytest.raises(InvalidArgumentError, match=wanted):
            await stack.enter_async_context(fleet_of(*workers, sha=sha))


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_fleet_refuses_workers_of_a_protocol_that_it_does_not_speak(role):
    later = {"protocols": (PROTOCOL + 1, PROTOCOL + 2)}
    async with scripted(role, **later) as newer, scripted(role, protocols=(0, PROTOCOL + 1)) as both:
        async with scripted(role) as silent, fleet_of(newer, both, silent) as fleet:
            healthy = {status.address: status.healthy for status in fleet.status()}
            assert healthy == {newer.address: False, both.address: True, silent.address: True}
            pool = fleet.targets if role == "target" else fleet.drafts
            (refusal,) = pool.refusals()
            assert f"the {role} worker speaks versions {PROTOCOL + 1} to {PROTOCOL + 2}" in str(refusal)
            assert f"this orchestrator {OLDEST_PROTOCOL} to {PROTOCOL}: upgrade" in str(refusal)


@pytest.mark.slow
async def test_fleet_worker_of_another_vocabulary_that_joins_is_refused_and_reported(caplog):
    registry = ListRegistry()
    async with scripted("target", sha="own") as target, scripted("target", sha="other") as other:
        async with (
            scripted("target") as unknown,
            scripted("draft", sha="own") as draft,
            scripted("draft", vocab_size=49) as wrong,
            fleet_of(target, registry=registry, sha="own") as fleet,
        ):
            registry.known["target"] |= {other.address, unknown.address}
            await until(lambda: fleet.targets.refusals() != [])
            registry.known["draft"] = {draft.address, wrong.address}
            await until(lambda: fleet.drafts.num_up() == 1)  # a refused target's tokenizer does not count
            await until(lambda: fleet.targets.num_up() == 2)
            await until(lambda: fleet.drafts.refusals() != [])
            healthy = {status.address: status.healthy for status in fleet.status()}
            assert healthy.pop(other.address) is healthy.pop(wrong.address) is False
            assert all(healthy.values())
            assert f"target worker at {other.address} is refused" in caplog.text
            assert "50 token ids mean other tokens" in caplog.text
            assert "49 token ids" in caplog.text
            for number in range(4):
                session = make_session(f"s{number}", max_tokens=5)
                await finish(session, *clients(fleet, session), 3)
            assert other.blocks == wrong.blocks == []


@pytest.mark.slow
async def test_fleet_follows_the_registry(caplog):
    registry = ListRegistry()
    async with scripted("target") as target, fleet_of(registry=registry) as fleet:
        assert fleet.max_context is None
        registry.known["target"] = {target.address}
        await until(lambda: fleet.targets.pick() is not None)
        assert fleet.max_context == 1000
        registry.error = UnavailableError("no redis")
        await until(lambda: "known workers stay" in caplog.text)
        assert fleet.targets.pick() is not None
        registry.error = None
        registry.known["target"] = set()
        await asyncio.sleep(1.2)
        assert fleet.targets.pick() is not None, "its link is up: it is only not announced"
        await target.stop()
        await until(lambda: fleet.status() == [])


async def test_fleet_close_wakes_waiting_requests():
    async with fleet_of() as fleet:
        session = make_session()
        task = asyncio.create_task(finish(session, *clients(fleet, session, wait_s=60), 0))
        await asyncio.sleep(0.05)
        await fleet.close()
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(task, 30)


async def test_workers_get_no_more_time_than_the_caller_has():
    async with scripted("target", "draft") as (target, draft), fleet_of(target, draft) as fleet:
        session = make_session(max_tokens=10)
        session.deadline = time.monotonic() + 20
        await finish(session, *clients(fleet, session), 2)
        assert emitted(session) == continuation(PROMPT, 10)
        timeouts = [block.timeout_ms for worker in (target, draft) for block in worker.blocks]
        assert timeouts
        assert all(0 < timeout_ms <= 20_000 for timeout_ms in timeouts)


@pytest.mark.parametrize("silent", ["target", "draft"])
async def test_deadline_ends_the_request_without_marking_the_worker_as_failed(silent):
    async with scripted("target", "draft") as (target, draft), fleet_of(target, draft) as fleet:
        worker = target if silent == "target" else draft
        worker.on_block = lambda block: None
        session = make_session()
        session.deadline = time.monotonic() + 0.3
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            await asyncio.wait_for(finish(session, *clients(fleet, session), 2), 25)
        assert time.monotonic() - began > 0.2
        pool = fleet.targets if silent == "target" else fleet.drafts
        assert all(link.backoff.ready for link in pool.links.values())


async def test_expired_deadline_makes_no_call():
    async with scripted("target") as target, fleet_of(target) as fleet:
        session = make_session()
        session.deadline = time.monotonic() - 1
        with pytest.raises(DeadlineExceededError):
            await finish(session, *clients(fleet, session), 0)
        assert not target.blocks


@asynccontextmanager
async def link_to(address: str, check=lambda info: None):
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
