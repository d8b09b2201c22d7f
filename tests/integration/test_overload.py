"""More requests than an orchestrator takes: fair between tenants, refused with a delay, over in time."""

import asyncio
import math
import time
from functools import partial

import pytest

from gammaray.errors import DeadlineExceededError, ResourceExhaustedError
from gammaray.types import DrafterKind, GenerationRequest
from orchestrator import service
from orchestrator.access.caller import Caller
from orchestrator.storage.keys import StoreBounds
from tests.support.workers.service_helpers import running, tokens_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]

REQUEST = GenerationRequest("x = ", max_tokens=12, ignore_eos=True, drafter=DrafterKind.NONE)


async def finish(orchestrator, caller, request=REQUEST):
    return [chunk async for chunk in orchestrator.generate(request, caller)]


async def test_flood_is_rejected_with_a_delay_and_all_slots_are_freed(redis_server, target):
    settings = {"max_concurrent_requests": 3}
    async with running(redis_server, target.address, "", **settings) as orchestrator:
        results = await asyncio.wait_for(
            asyncio.gather(*(finish(orchestrator, Caller("a")) for _ in range(20)), return_exceptions=True),
            60,
        )
        refused = [result for result in results if isinstance(result, ResourceExhaustedError)]
        assert len(refused) == 14
        assert all(1 <= error.retry_after_s < math.inf for error in refused)
        assert sum(isinstance(result, list) for result in results) == 6
        assert (orchestrator.admission.num_running, orchestrator.admission.num_waiting) == (0, 0)
        assert await finish(orchestrator, Caller("a"))


async def test_deadline_ends_a_running_request_and_frees_its_slot(redis_server, target):
    target.delay_s = 0.1
    async with running(redis_server, target.address, "") as orchestrator:
        request = GenerationRequest("x", max_tokens=500, ignore_eos=True, drafter=DrafterKind.NONE)
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            await finish(orchestrator, Caller(deadline=time.monotonic() + 0.5), request)
        assert time.monotonic() - began < 25, "half of what it would take"
        assert orchestrator.admission.num_running == 0


async def test_deleting_sessions_frees_stored_bytes(redis_server, target, monkeypatch):
    monkeypatch.setattr(service, "StoreBounds", partial(StoreBounds, total=2**20, tenant_share=0.1))
    async with running(redis_server, target.address, "") as orchestrator:
        names = []

        async def fill():
            for _ in range(100):
                (*_, last) = await finish(orchestrator, Caller("full"))
                names.append(last.session_id)

        with pytest.raises(ResourceExhaustedError, match=r"tenant full: .* of 104858 bytes") as refused:
            await fill()
        assert 10 < len(names) < 40
        assert 1 <= refused.value.retry_after_s <= 3600
        assert len(tokens_of(await finish(orchestrator, Caller("other")))) == 12
        for name in names[:5]:
            assert await orchestrator.sessions.delete(name, Caller("full"))
        assert len(tokens_of(await finish(orchestrator, Caller("full")))) == 12
        for caller in (Caller("full"), Caller("other")):
            for info in await orchestrator.sessions.recent(1000, caller):
                await orchestrator.sessions.delete(info.session_id, caller)
