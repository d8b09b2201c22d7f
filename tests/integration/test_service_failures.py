"""Rejected requests and survived failures of the orchestrator, on scripted workers and a real Redis."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing

import pytest

from gammaray.config import OrchestratorSettings
from gammaray.errors import (
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gammaray.types import ADAPTIVE, DrafterKind, GammaPolicy, GenerationRequest, SamplingParams
from orchestrator.service import Orchestrator
from tests.support.workers.redis_helpers import redis_name, running_redis
from tests.support.workers.scripted_workers import scripted, until, until_so
from tests.support.workers.service_helpers import PROMPTS, announced, complete, deadlines, running, tokens_of

pytestmark = pytest.mark.integration

BIASED = SamplingParams(logit_bias={2048: 1.0})
NOT_A_NUMBER = SamplingParams(temperature=float("nan"))


@pytest.fixture
async def target():
    async with scripted("target", vocab_size=2048, max_context=2048) as target:
        yield target


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
        pytest.param({"model": "gpt-7"}, NotFoundError, "'gpt-7'.*'demo'", id="unknown-model"),
        pytest.param({"prompt": ""}, InvalidArgumentError, "prompt", id="empty-text"),
        pytest.param({"prompt": ()}, InvalidArgumentError, "prompt", id="no-tokens"),
        pytest.param({"prompt": (5,) * 2048}, InvalidArgumentError, "2048 tokens.*2047", id="too-long"),
        pytest.param({"prompt": "a b " * 3000}, InvalidArgumentError, "tokens.*2047", id="too-long-text"),
        pytest.param({"prompt": "x" * (2**20 + 1)}, InvalidArgumentError, "1048577", id="too-big"),
        pytest.param({"prompt": "é" * 2**20}, InvalidArgumentError, "2097152 bytes", id="too-many-bytes"),
        pytest.param({"prompt": "a\ud800"}, InvalidArgumentError, "surrogate", id="surrogate"),
        pytest.param({"prompt": (1, 2048)}, InvalidArgumentError, "prompt: got 2048", id="token-id"),
        pytest.param({"prompt": (1, -1)}, InvalidArgumentError, "prompt: got -1", id="negative-token"),
        pytest.param({"stop_token_ids": (2048,)}, InvalidArgumentError, "stop_token_ids", id="stop-token"),
        pytest.param({"max_tokens": 0}, InvalidArgumentError, "max_tokens", id="max-tokens"),
        pytest.param({"gamma": GammaPolicy(65)}, InvalidArgumentError, "gamma", id="gamma"),
        pytest.param({"sampling": BIASED}, InvalidArgumentError, "logit_bias", id="bias"),
        pytest.param({"sampling": NOT_A_NUMBER}, InvalidArgumentError, "temperature", id="nan"),
    ],
)
async def test_service_bad_request_is_refused_and_leaves_nothing(orchestrator, redis, fields, error, wanted):
    keys = await lasting_keys(redis)
    with pytest.raises(error, match=wanted):
        await complete(orchestrator, dataclasses.replace(GenerationRequest("x", max_tokens=4), **fields))
    assert await lasting_keys(redis) == keys
    assert orchestrator.admission.num_running == 0


async def test_service_too_many_requests_are_refused_with_a_delay(redis_server, target):
    async with running(redis_server, target.address, "", max_concurrent_requests=2) as orchestrator:
        request = GenerationRequest(PROMPTS[0], max_tokens=500, ignore_eos=True)
        async with aclosing(orchestrator.generate(request)) as one:
            async with aclosing(orchestrator.generate(request)) as two:
                await anext(one)
                await anext(two)
                short = dataclasses.replace(request, max_tokens=2)
                waiting = [asyncio.create_task(complete(orchestrator, short)) for _ in range(2)]
                await until(lambda: orchestrator.admission.num_waiting == 2)
                with pytest.raises(ResourceExhaustedError, match="2 requests") as refused:
                    await complete(orchestrator, request)
                assert refused.value.retry_after_s > 0
        assert all(await asyncio.gather(*waiting))


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


async def test_service_start_without_redis_is_unavailable():
    with deadlines(redis_wait_s=0), pytest.raises(UnavailableError, match="Redis"):
        await Orchestrator.start(OrchestratorSettings(redis_url="redis://127.0.0.1:1/0"))


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


async def test_service_start_with_an_unknown_model_names_it(redis_server):
    with pytest.raises(InvalidArgumentError, match="no/such-model"):
        await Orchestrator.start(OrchestratorSettings(redis_url=redis_server.url, model="no/such-model"))


async def test_service_loss_of_redis_fails_the_request_and_frees_the_workers(target):
    with running_redis() as server:
        async with running(server, target.address, "") as orchestrator:
            request = GenerationRequest(PROMPTS[0], max_tokens=1000, ignore_eos=True)
            with pytest.raises(UnavailableError, match="Redis"):
                await complete(orchestrator, request, lambda count: server.stop())
            (redis_status,) = [p for p in await orchestrator.status() if p.role == "redis"]
            assert not redis_status.healthy
            await until(lambda: target.released != [])
