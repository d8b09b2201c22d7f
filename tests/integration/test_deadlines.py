"""The caller's deadline is passed to the workers, and a short one does not mark them as failed."""

import asyncio
import time

import pytest

from gammaray.errors import DeadlineExceededError
from tests.support.workers.fleet_helpers import clients, emitted, fleet_of
from tests.support.workers.scripted_workers import PROMPT, continuation, finish, make_session, scripted

pytestmark = pytest.mark.integration


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
