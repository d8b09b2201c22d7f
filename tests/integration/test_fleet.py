"""The fleet: workers that join and leave, with another vocabulary, and the callers' deadlines."""

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from gammaray.blocks import OLDEST_PROTOCOL, PROTOCOL
from gammaray.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
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
            await until(lambda: fleet.drafts.num_up == 1)  # a refused target's tokenizer does not count
            await until(lambda: fleet.targets.num_up == 2)
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
