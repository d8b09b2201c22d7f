"""The orchestrator with the demo pair in real worker processes and a real Redis, without Ray."""

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from gammaray.errors import FailedPreconditionError
from gammaray.types import (
    FinishReason,
    GammaPolicy,
    GenerationRequest,
    SamplingParams,
    TokenOrigin,
    VerificationMethod,
)
from orchestrator.access.caller import ANONYMOUS, Caller
from orchestrator.storage.session_store import RedisStore
from tests.support.workers.resume_helpers import first_chunks, sessions_on
from tests.support.workers.scripted_workers import scripted
from tests.support.workers.service_helpers import PROMPTS, SEEDED, complete, running, text_of, tokens_of

pytestmark = pytest.mark.integration

GREEDY = SamplingParams(temperature=0.0, seed=0)


@pytest.mark.parametrize("method", list(VerificationMethod))
async def test_service_every_method_completes_and_accounts_for_its_tokens(orchestrator, method):
    request = GenerationRequest(
        PROMPTS[0], sampling=SEEDED, max_tokens=60, verification=method, gamma=GammaPolicy(4)
    )
    chunks = await complete(orchestrator, request)
    tokens = [token for chunk in chunks for token in chunk.tokens]
    accepted = sum(token.origin is TokenOrigin.ACCEPTED for token in tokens)
    last, (usage, summary) = chunks[-1], (chunks[-1].usage, chunks[-1].summary)
    assert all(c.finish_reason is c.usage is c.summary is None for c in chunks[:-1])
    assert last.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    assert usage.completion_tokens == len(tokens) <= 60
    assert usage.prompt_tokens == len(orchestrator.tokenizer.encode(PROMPTS[0]))
    assert summary.accepted_tokens == accepted > 0
    assert usage.accepted_prediction_tokens == usage.rejected_prediction_tokens == 0
    drafted = summary.drafted_tokens
    assert summary.cycles == len(chunks)
    assert summary.tokens_per_cycle == pytest.approx(len(tokens) / len(chunks))
    assert summary.acceptance_rate == pytest.approx(accepted / drafted)
    assert summary.gamma_mean == pytest.approx(drafted / len(chunks))
    assert sum(j * n for j, n in enumerate(summary.accepted_lengths)) == accepted
    assert sum(summary.accepted_lengths) == summary.cycles
    assert 0 < summary.alpha <= 1
    parts = summary.draft_ms + summary.verify_ms + summary.other_ms
    assert parts == pytest.approx(summary.total_ms, rel=0.01)
    assert all(token.token_bytes for token in tokens)
    shown = [token.token_id for token in tokens if token.token_id != 0]
    assert text_of(chunks) == orchestrator.tokenizer.decode(shown)


async def test_service_stop_string_cuts_text_tokens_and_store(orchestrator, redis):
    def request(**fields):
        return GenerationRequest(PROMPTS[0], sampling=GREEDY, max_tokens=60, **fields)

    full = await complete(orchestrator, request())
    text = text_of(full)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    for gamma in (0, 1, 3, 8):
        chunks = await complete(
            orchestrator, request(stop=(stop,), gamma=GammaPolicy(gamma), session_id=f"stop-{gamma}")
        )
        assert text_of(chunks) == text[: text.index(stop)]
        assert chunks[-1].finish_reason is FinishReason.STOP
        tokens = tokens_of(chunks)
        assert tokens == tokens_of(full)[: len(tokens)]
        assert stop in orchestrator.tokenizer.decode(tokens)
        assert stop not in orchestrator.tokenizer.decode(tokens[:-1])
        stored = await RedisStore(redis, 60).read(f"stop-{gamma}")
        assert list(stored.token_ids) == tokens
        assert stored.finish_reason is FinishReason.STOP


async def test_service_stores_tokens_before_it_sends_them(orchestrator, redis):
    store, seen = RedisStore(redis, 60), []
    request = GenerationRequest(PROMPTS[0], max_tokens=30, session_id="watched")
    async for chunk in orchestrator.generate(request):
        seen += [token.token_id for token in chunk.tokens]
        assert list((await store.read("watched")).token_ids[: len(seen)]) == seen
    with pytest.raises(FailedPreconditionError, match="watched already exists"):
        await complete(orchestrator, request)


async def test_service_completion_ends_at_the_context(orchestrator):
    prompt = tuple([5] * (orchestrator.max_context - 6))
    request = GenerationRequest(prompt, sampling=GREEDY, max_tokens=100, ignore_eos=True)
    chunks = await complete(orchestrator, request)
    assert len(tokens_of(chunks)) == 6
    assert chunks[-1].finish_reason is FinishReason.LENGTH


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


@pytest.mark.slow
@pytest.mark.parametrize("tenant", ["", "alice"])
async def test_unstored_completion_is_counted_and_leaves_nothing_behind(redis_server, redis, workers, tenant):
    """Its tokens are those of a stored one; nor does anything stay if its client disconnects."""

    def num_tokens():
        series = {metric.name: found for metric, found in orchestrator.meter.meter.read()}
        return sum(counter.value for _, counter in series["gammaray.tokens"])

    caller = Caller(tenant) if tenant else ANONYMOUS
    async with running(redis_server, *workers) as orchestrator:
        async with unchanged(redis):
            chunks = [chunk async for chunk in orchestrator.generate(UNSTORED, caller)]
            assert (num_tokens(), orchestrator.corpus.num_tokens) == (UNSTORED.max_tokens, 0)
            await first_chunks(orchestrator, UNSTORED, 2)
            assert await sessions_on(orchestrator, 0) == 0
        stored = await complete(orchestrator, replace(UNSTORED, store=True))
        assert orchestrator.corpus.num_tokens > 0
        assert tokens_of(chunks) == tokens_of(stored)
        assert text_of(chunks) == text_of(stored)
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert {chunk.session_id for chunk in chunks} == {""}
        assert chunks[-1].summary.cycles > 0


@pytest.mark.slow
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


@pytest.mark.slow
async def test_worker_that_dropped_an_unstored_session_gets_its_tokens_again(redis_server, workers):
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
