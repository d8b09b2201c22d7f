"""Completions that are not stored: nothing of them is in Redis, and all else is as of those that are."""

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from gammaray.errors import InvalidArgumentError
from gammaray.types import FinishReason, GenerationRequest
from orchestrator.access.caller import ANONYMOUS, Caller
from tests.support.workers.resume_helpers import first_chunks, sessions_on
from tests.support.workers.scripted_workers import scripted
from tests.support.workers.service_helpers import PROMPTS, SEEDED, complete, running, text_of, tokens_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]

UNSTORED = GenerationRequest(PROMPTS[0], sampling=SEEDED, max_tokens=48, ignore_eos=True, store=False)


@asynccontextmanager
async def unchanged(redis):
    """Check that no key of a session is written inside the block, not even one that is removed again."""
    async with redis.monitor() as monitor:
        yield
        mark = "gammaray-test-mark"
        await redis.set(mark, 1)
        seen = []
        async for event in monitor.listen():
            if mark in event["command"]:
                break
            seen.append(event["command"])
    await redis.delete(mark)
    assert not [command for command in seen if "gammaray:session" in command or "EVAL" in command], seen


@pytest.mark.parametrize("tenant", ["", "alice"])
async def test_redis_has_nothing_of_it_and_the_tokens_are_the_same(redis_server, redis, workers, tenant):
    caller = Caller(tenant) if tenant else ANONYMOUS
    async with running(redis_server, *workers) as orchestrator:
        async with unchanged(redis):
            chunks = [chunk async for chunk in orchestrator.generate(UNSTORED, caller)]
        stored = await complete(orchestrator, replace(UNSTORED, store=True))
        assert tokens_of(chunks) == tokens_of(stored)
        assert text_of(chunks) == text_of(stored)
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert {chunk.session_id for chunk in chunks} == {""}
        assert chunks[-1].summary.cycles > 0
        assert await sessions_on(orchestrator, 0) == 0


@pytest.mark.parametrize("is_stored", [True, False])
async def test_target_workers_are_told_to_keep_nothing_to_learn_from(redis_server, is_stored):
    async with (
        scripted("target", vocab_size=2048) as target,
        running(redis_server, target.address, "") as orchestrator,
    ):
        await complete(orchestrator, replace(UNSTORED, store=is_stored, max_tokens=4))
    specs = [block.spec for block in target.blocks if block.HasField("spec")]
    assert specs
    assert all(spec.no_learning is not is_stored for spec in specs)


async def test_it_is_counted_and_leaves_nothing_for_later_outputs(redis_server, workers):
    def count(orchestrator, name):
        for metric, series in orchestrator.meter.meter.read():
            if metric.name == name:
                return sum(counter.value for _, counter in series)
        raise AssertionError(name)

    async with running(redis_server, *workers) as orchestrator:
        await complete(orchestrator, UNSTORED)
        assert count(orchestrator, "gammaray.tokens") == UNSTORED.max_tokens
        assert orchestrator.corpus.num_tokens == 0
        await complete(orchestrator, replace(UNSTORED, store=True))
        assert count(orchestrator, "gammaray.tokens") == 2 * UNSTORED.max_tokens
        assert orchestrator.corpus.num_tokens > 0


async def test_client_that_disconnects_leaves_no_cache(redis_server, redis, workers):
    async with running(redis_server, *workers) as orchestrator:
        async with unchanged(redis):
            await first_chunks(orchestrator, UNSTORED, 2)
            assert await sessions_on(orchestrator, 0) == 0


async def test_worker_that_dropped_it_gets_its_tokens_again(redis_server, workers):
    """As when its cache was evicted: the store is not asked who owns it."""
    async with running(redis_server, *workers) as orchestrator:
        whole = tokens_of(await complete(orchestrator, UNSTORED))
        chunks = []
        async for chunk in orchestrator.generate(UNSTORED):
            chunks.append(chunk)
            if len(chunks) == 2:
                for pool in (orchestrator.fleet.targets, orchestrator.fleet.drafts):
                    for link in pool.links.values():
                        for name in list(link.sessions):
                            link.release(name, 1)
        assert tokens_of(chunks) == whole


def test_session_that_is_named_must_be_stored():
    named = {"session_id": "mine"}
    for fields in (named, {**named, "turn": 1}, {"resume_from": 0}):
        with pytest.raises(InvalidArgumentError, match="is no session to name or resume") as caught:
            replace(UNSTORED, **fields).validate()
        assert caught.value.field == "store"
