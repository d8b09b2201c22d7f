"""Rejected requests, overload and survived failures of the orchestrator, on scripted workers."""

import asyncio
import dataclasses
import math
import time
from functools import partial
from urllib.parse import urlsplit

import pytest

from gammaray.config import OrchestratorSettings
from gammaray.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gammaray.types import ADAPTIVE, DrafterKind, GammaPolicy, GenerationRequest, SamplingParams
from orchestrator import service
from orchestrator.access.caller import Caller
from orchestrator.service import Orchestrator
from orchestrator.storage.keys import StoreBounds
from tests.support.workers.redis_helpers import redis_name, running_redis
from tests.support.workers.scripted_workers import until, until_so
from tests.support.workers.service_helpers import PROMPTS, announced, complete, running, tokens_of

pytestmark = pytest.mark.integration


@pytest.fixture
async def orchestrator(redis_server, target):
    async with running(redis_server, target.address, "") as orchestrator:
        yield orchestrator


async def lasting_keys(redis):
    """Return the stored keys without the registry entries of orchestrators, which change."""
    return {key for key in await redis.keys() if not key.startswith(b"gammaray:orchestrator")}


@pytest.mark.parametrize(
    ("fields", "error", "wanted"),
    [
        ({"model": "gpt-7"}, NotFoundError, "'gpt-7'.*'demo'"),
        ({"prompt": "a b " * 3000}, InvalidArgumentError, "tokens.*2047"),
        ({"prompt": (1, 2048)}, InvalidArgumentError, "prompt: got 2048"),
        ({"sampling": SamplingParams(logit_bias={2048: 1.0})}, InvalidArgumentError, "logit_bias"),
    ],
    ids=lambda value: str(value)[:30].encode("ascii", "replace").decode() if isinstance(value, dict) else "",
)
async def test_service_bad_request_is_refused_and_leaves_nothing(orchestrator, redis, fields, error, wanted):
    keys = await lasting_keys(redis)
    with pytest.raises(error, match=wanted):
        await complete(orchestrator, dataclasses.replace(GenerationRequest("x", max_tokens=4), **fields))
    assert await lasting_keys(redis) == keys
    assert orchestrator.admission.num_running == 0


async def test_service_without_a_draft_worker_decodes_plainly(redis_server, target):
    async with running(redis_server, target.address, "") as orchestrator:
        plain = [{"drafter": DrafterKind.NONE}, {"gamma": GammaPolicy(0)}]
        for salt, fields in enumerate((*plain, {"gamma": GammaPolicy(4)}, {"gamma": ADAPTIVE})):
            # Without a salt of its own, the second request on would propose the first one's output.
            fields["cache_salt"] = str(salt)
            request = GenerationRequest(PROMPTS[0], max_tokens=10, ignore_eos=True, **fields)
            chunks = await complete(orchestrator, request)
            assert len(tokens_of(chunks)) == chunks[-1].summary.cycles == 10
            assert chunks[-1].summary.accepted_tokens == chunks[-1].summary.model_cycles == 0
            if fields in plain:
                assert chunks[-1].summary.alpha is None


async def test_service_permanent_loss_of_the_target_is_unavailable(redis_server, target):
    stopping = []
    async with running(redis_server, target.address, "", worker_wait_s=0.5) as orchestrator:
        request = GenerationRequest(PROMPTS[0], max_tokens=1000, ignore_eos=True)
        with pytest.raises(UnavailableError, match="no target worker"):
            await complete(
                orchestrator, request, lambda count: stopping.append(asyncio.create_task(target.stop()))
            )
        await asyncio.gather(*stopping)


async def test_service_start_waits_for_redis(redis_server, target, caplog):
    async with redis_name(redis_server) as (name, url):
        name.reply = "LOADING Redis is loading the dataset in memory"
        starting = asyncio.create_task(Orchestrator.start(OrchestratorSettings(redis_url=url)))
        await until(lambda: "waiting up to 60 s" in caplog.text)
        assert not starting.done()
        name.reply = ""
        async with announced(redis_server.url, target.address, ""):
            orchestrator = await starting
            request = GenerationRequest(PROMPTS[0], max_tokens=3, ignore_eos=True)
            assert len(tokens_of(await complete(orchestrator, request))) == 3
            await orchestrator.close()
    assert "responded after" in caplog.text
    assert urlsplit(url).password
    assert urlsplit(url).password not in caplog.text


@pytest.mark.parametrize("reply", ["NOPERM no permissions", "OOM no memory", "BUSY a script", "ERR a bug"])
async def test_service_reports_its_status_for_any_redis_reply(redis_server, target, reply):
    async with announced(redis_server.url, target.address, ""), redis_name(redis_server) as (name, url):
        orchestrator = await Orchestrator.start(OrchestratorSettings(redis_url=url))
        name.reply = reply
        health = {process.role: process.healthy for process in await orchestrator.status()}
        assert health == {"orchestrator": True, "target": True, "redis": False}
        name.reply = ""

        async def is_healthy():
            return all(process.healthy for process in await orchestrator.status())

        assert await until_so(is_healthy)
        await orchestrator.close()


async def test_service_loss_of_redis_fails_the_request_and_frees_the_workers(target):
    with running_redis() as server:
        async with running(server, target.address, "") as orchestrator:
            request = GenerationRequest(PROMPTS[0], max_tokens=1000, ignore_eos=True)
            with pytest.raises(UnavailableError, match="Redis"):
                await complete(orchestrator, request, lambda count: server.stop())
            (redis_status,) = [p for p in await orchestrator.status() if p.role == "redis"]
            assert not redis_status.healthy
            await until(lambda: target.released != [])


SHORT = GenerationRequest("x = ", max_tokens=12, ignore_eos=True, drafter=DrafterKind.NONE)


async def generated(orchestrator, caller, request=SHORT):
    return [chunk async for chunk in orchestrator.generate(request, caller)]


@pytest.mark.slow
async def test_flood_is_rejected_with_a_delay_and_all_slots_are_freed(redis_server, target):
    settings = {"max_concurrent_requests": 3}
    async with running(redis_server, target.address, "", **settings) as orchestrator:
        results = await asyncio.wait_for(
            asyncio.gather(
                *(generated(orchestrator, Caller("a")) for _ in range(20)), return_exceptions=True
            ),
            60,
        )
        refused = [result for result in results if isinstance(result, ResourceExhaustedError)]
        assert len(refused) == 14
        assert all(1 <= error.retry_after_s < math.inf for error in refused)
        assert sum(isinstance(result, list) for result in results) == 6
        assert (orchestrator.admission.num_running, orchestrator.admission.num_waiting) == (0, 0)
        assert await generated(orchestrator, Caller("a"))


@pytest.mark.slow
async def test_deadline_ends_a_running_request_and_frees_its_slot(redis_server, target):
    target.delay_s = 0.1
    async with running(redis_server, target.address, "") as orchestrator:
        request = GenerationRequest("x", max_tokens=500, ignore_eos=True, drafter=DrafterKind.NONE)
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            await generated(orchestrator, Caller(deadline=time.monotonic() + 0.5), request)
        assert time.monotonic() - began < 25, "half of what it would take"
        assert orchestrator.admission.num_running == 0


@pytest.mark.slow
async def test_deleting_sessions_frees_stored_bytes(redis_server, target, monkeypatch):
    monkeypatch.setattr(service, "StoreBounds", partial(StoreBounds, total=2**20, tenant_share=0.1))
    async with running(redis_server, target.address, "") as orchestrator:
        names = []

        async def fill():
            for _ in range(100):
                (*_, last) = await generated(orchestrator, Caller("full"))
                names.append(last.session_id)

        with pytest.raises(ResourceExhaustedError, match=r"tenant full: .* of 104858 bytes") as refused:
            await fill()
        assert 10 < len(names) < 40
        assert 1 <= refused.value.retry_after_s <= 3600
        assert len(tokens_of(await generated(orchestrator, Caller("other")))) == 12
        for name in names[:5]:
            assert await orchestrator.sessions.delete(name, Caller("full"))
        assert len(tokens_of(await generated(orchestrator, Caller("full")))) == 12
        for caller in (Caller("full"), Caller("other")):
            for info in await orchestrator.sessions.recent(1000, caller):
                await orchestrator.sessions.delete(info.session_id, caller)
