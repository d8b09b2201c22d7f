"""The orchestrator with the demo pair in real worker processes and a real Redis, without Ray."""

import asyncio
import time
from contextlib import aclosing

import grpc
import pytest

from gammaray.errors import FailedPreconditionError
from gammaray.types import (
    ADAPTIVE,
    DrafterKind,
    FinishReason,
    GammaPolicy,
    GenerationRequest,
    SamplingParams,
    TokenOrigin,
    VerificationMethod,
)
from gammaray.wire.sessions import SessionState
from orchestrator.storage.session_store import RedisStore
from orchestrator.workers.protocol import DRAFT, TARGET
from tests.support.workers.scripted_workers import until_so
from tests.support.workers.service_helpers import PROMPTS, SEEDED, complete, text_of, tokens_of

pytestmark = pytest.mark.integration

GREEDY = SamplingParams(temperature=0.0, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("params", [SEEDED, GREEDY], ids=["temperature-1", "greedy"])
async def test_service_tokens_do_not_depend_on_gamma_drafter_or_concurrency(orchestrator, params):
    def request(index, **fields):
        fields = {"prompt": PROMPTS[index], "sampling": params, "max_tokens": 40, **fields}
        return GenerationRequest(**fields)

    plain = [
        tokens_of(await complete(orchestrator, request(i, gamma=GammaPolicy(0)))) for i in range(len(PROMPTS))
    ]
    assert all(1 <= len(tokens) <= 40 for tokens in plain)
    variants = [{"gamma": GammaPolicy(1)}, {"gamma": GammaPolicy(3)}, {"gamma": GammaPolicy(8)}]
    variants += [{"gamma": ADAPTIVE}, {"drafter": DrafterKind.NONE}]
    for fields in variants:
        assert tokens_of(await complete(orchestrator, request(0, **fields))) == plain[0]
    together = await asyncio.gather(
        *(complete(orchestrator, request(i % 4, **variants[i % len(variants)])) for i in range(8))
    )
    assert [tokens_of(chunks) for chunks in together] == plain + plain


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


async def sessions_on_workers(orchestrator) -> int:
    total = 0
    for pool, protocol in ((orchestrator.fleet.targets, TARGET), (orchestrator.fleet.drafts, DRAFT)):
        for address in pool.links:
            async with grpc.aio.insecure_channel(address) as channel:
                total += (await protocol.get_info(channel, 30.0)).num_sessions
    return total


async def both_hold(orchestrator) -> bool:
    return await sessions_on_workers(orchestrator) >= 2


@pytest.mark.parametrize("how", ["closed", "cancelled", "finished"])
async def test_service_ended_request_frees_the_workers(orchestrator, redis, how):
    name = f"ended-{how}-{time.time_ns()}"
    request = GenerationRequest(
        PROMPTS[0], max_tokens=20 if how == "finished" else 1500, ignore_eos=True, session_id=name
    )
    started = asyncio.Event()

    async def consume():
        async with aclosing(orchestrator.generate(request)) as chunks:
            count = 0
            async for _ in chunks:
                count += 1
                started.set()
                if how == "closed" and count == 3:
                    return

    task = asyncio.create_task(consume())
    await asyncio.wait_for(started.wait(), 30)
    if how == "cancelled":
        assert await until_so(lambda: both_hold(orchestrator))
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    deadline = time.monotonic() + 30
    while await sessions_on_workers(orchestrator) > 0:
        assert time.monotonic() < deadline, "the workers still hold the session"
        await asyncio.sleep(0.05)
    await orchestrator.leases.settled()
    stored = await RedisStore(redis, 60).read(name)
    # A client that went away may come back, see test_resume.py.
    assert stored.finish_reason is (FinishReason.LENGTH if how == "finished" else None)
    assert stored.state is not SessionState.RUNNING
    assert orchestrator.admission.num_running == 0
