"""Takeover of sessions: two orchestrators, real workers of the demo pair, a real Redis."""

import asyncio
import dataclasses
import time
from contextlib import aclosing

import pytest

from gammaray.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from gammaray.types import FinishReason, GammaPolicy, GenerationRequest, SamplingParams, TokenOrigin
from gammaray.wire.sessions import SessionState
from orchestrator.access.caller import ANONYMOUS, Caller
from orchestrator.sessions.lifecycle import SessionManager
from orchestrator.storage.keys import Keys
from tests.support.workers.resume_helpers import (
    any_model,
    first_chunks,
    request_of,
    resumed,
    sessions_on,
    two_orchestrators,
    undisturbed,
)
from tests.support.workers.service_helpers import PROMPTS, complete, first_tokens, rest_of, text_of, tokens_of

pytestmark = pytest.mark.integration

GREEDY = SamplingParams(temperature=0.0, seed=0)


@pytest.fixture
async def pair(redis_server, workers):
    async with two_orchestrators(redis_server, workers) as pair:
        yield pair


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"num_top_logprobs": 2, "gamma": GammaPolicy(3)},
        {"prompt": "# naïve café — 日本語\ns = '"},
    ],
    ids=["logprobs", "unicode"],
)
async def test_resume_on_another_orchestrator_changes_nothing(pair, fields):
    one, other = pair
    request = request_of(**{"max_tokens": 120, **fields})
    whole = await complete(one, undisturbed(request))
    chunks, turn = await first_chunks(one, request, 2), 0
    while chunks[-1].finish_reason is None:
        turn += 1
        rest = await first_chunks((other, one)[turn % 2], resumed(request, chunks), 3)
        assert rest[0].offset == len(tokens_of(chunks))
        chunks += rest
    assert turn > 2
    assert text_of(chunks) == text_of(whole)
    received, wanted = ([token for chunk in c for token in chunk.tokens] for c in (chunks, whole))
    assert [token.token_id for token in received] == [token.token_id for token in wanted]
    assert [token.token_bytes for token in received] == [token.token_bytes for token in wanted]
    if "num_top_logprobs" in fields:
        assert [t.logprob for t in received] == pytest.approx([t.logprob for t in wanted], abs=1e-4)
        assert all(len(token.top_logprobs) == 2 for token in received)
    assert chunks[-1].usage.completion_tokens == len(received)
    assert chunks[-1].summary.accepted_tokens == sum(t.origin is TokenOrigin.ACCEPTED for t in received)
    assert chunks[-1].seed == whole[-1].seed


async def test_resume_of_a_finished_turn_from_every_offset(pair):
    one, other = pair
    text = text_of(await complete(one, undisturbed(request_of(sampling=GREEDY))))
    stop = text[len(text) * 2 // 3 :][:4]
    request = request_of(sampling=GREEDY, stop=(stop,))
    chunks = await complete(one, request)
    assert chunks[-1].finish_reason is FinishReason.STOP
    began, _ = await one.sessions.get(request.session_id, ANONYMOUS)
    for count in range(len(chunks) + 1):
        (*_, last) = rest = await complete(other, resumed(request, chunks[:count]))
        assert text_of(chunks[:count]) + text_of(rest) == text_of(chunks)
        assert tokens_of(chunks[:count]) + tokens_of(rest) == tokens_of(chunks)
        assert last.finish_reason is FinishReason.STOP
        assert last.usage.completion_tokens == len(tokens_of(chunks))
    info, tokens = await other.sessions.get(request.session_id, ANONYMOUS)
    assert (info.state, info.finish_reason) == (SessionState.FINISHED, FinishReason.STOP)
    assert info.epoch == began.epoch
    assert [token.token_id for token in tokens] == tokens_of(chunks)


async def test_takeover_ends_the_former_owner_and_loses_no_token(pair):
    one, other = pair
    request = request_of(max_tokens=400)
    whole = await complete(one, undisturbed(request))
    async with aclosing(one.generate(request)) as stream:
        chunks = [await anext(stream) for _ in range(3)]
        began, _ = await one.sessions.get(request.session_id, ANONYMOUS)
        rest = other.generate(resumed(request, chunks))  # the client came back elsewhere
        chunks.append(await anext(rest))
        with pytest.raises(FailedPreconditionError, match="another owner"):
            await rest_of(stream)
    await one.leases.settled()
    chunks += await rest_of(rest)
    assert tokens_of(chunks) == tokens_of(whole)
    assert text_of(chunks) == text_of(whole)
    info, _ = await one.sessions.get(request.session_id, ANONYMOUS)
    assert info.epoch > began.epoch
    assert info.state is SessionState.FINISHED


async def test_resume_restores_counters_and_workers(pair):
    one, other = pair
    request = request_of(max_tokens=300)
    chunks = await first_chunks(one, request, 30)
    await one.leases.settled()
    opener = SessionManager(other.store, other.tokenizer, any_model)
    opened = await opener.open(resumed(request, chunks), other.max_context)
    handover = opened.handover
    assert handover.counters.cycles >= 25
    links = other.fleet.targets.links, other.fleet.drafts.links
    assert handover.target in links[0]
    assert handover.draft in links[1]


async def test_invalid_resume_is_rejected(pair):
    one, other = pair
    request = request_of(max_tokens=300)
    chunks = await first_chunks(one, request, 3)
    await one.leases.settled()
    refused = {
        "already begun turn 0|already exists": request,
        "another request": dataclasses.replace(request, prompt="else", resume_from=1),
        "allowed: up to": dataclasses.replace(request, resume_from=10_000),
        "turn .* got 1, turn 0 has not finished": dataclasses.replace(request, turn=1),
        "turn .* got 2": dataclasses.replace(request, turn=2, resume_from=0),
    }
    for match, bad in refused.items():
        with pytest.raises(FailedPreconditionError, match=match):
            await complete(other, bad)
    with pytest.raises(NotFoundError):
        await complete(other, dataclasses.replace(request, session_id="unknown", resume_from=1))
    with pytest.raises(NotFoundError):
        await complete(other, dataclasses.replace(request, session_id="unknown", prompt="", resume_from=0))
    with pytest.raises(InvalidArgumentError, match="session_id"):
        await complete(other, dataclasses.replace(request, session_id="", resume_from=0))
    rest = await complete(other, GenerationRequest("", session_id=request.session_id, resume_from=3))
    assert tokens_of(rest)[: len(tokens_of(chunks)) - 3] == tokens_of(chunks)[3:]


async def test_resume_from_offset_0_begins_the_session_once(pair):
    """The request of a client whose first call failed, whether or not a server had received it."""
    one, other = pair
    request = request_of()
    whole = await complete(one, undisturbed(request))
    begun = await complete(one, dataclasses.replace(request, resume_from=0))
    again = await complete(other, dataclasses.replace(request, resume_from=0))
    assert tokens_of(begun) == tokens_of(again) == tokens_of(whole)


async def test_turns_continue_a_session(pair):
    one, other = pair
    request = request_of(max_tokens=20)
    idle = await sessions_on(one)
    first = await complete(one, request)
    second = dataclasses.replace(request, prompt="\n\ndef second(", turn=1)
    chunks = await first_chunks(other, second, 2)
    chunks += await complete(one, resumed(second, chunks))
    assert all(chunk.turn == 1 for chunk in chunks)
    before = (*one.tokenizer.encode(PROMPTS[0]), *tokens_of(first))
    prompt = before + tuple(one.tokenizer.encode("\n\ndef second(", is_start=False))
    plain = await complete(one, undisturbed(request_of(prompt, max_tokens=20)))
    assert tokens_of(chunks) == tokens_of(plain)
    assert chunks[-1].usage.prompt_tokens == len(prompt)
    assert await sessions_on(one, idle) == idle
    with pytest.raises(FailedPreconditionError, match="turn 1 has finished"):
        await complete(one, resumed(request, first))


async def test_cancel_ends_the_stream_permanently(pair):
    one, other = pair
    request = request_of(max_tokens=1500)
    async with aclosing(one.generate(request)) as stream:
        chunks = [await anext(stream) for _ in range(3)]
        info = await other.sessions.cancel(request.session_id, ANONYMOUS)
        assert (info.state, info.finish_reason) == (SessionState.FINISHED, FinishReason.CANCELLED)
        chunks += await rest_of(stream)
    assert chunks[-1].finish_reason is FinishReason.CANCELLED
    assert len(tokens_of(chunks)) < 1500
    assert await sessions_on(one, 0) == 0
    rest = await complete(other, resumed(request, chunks[:2]))
    assert rest[-1].finish_reason is FinishReason.CANCELLED
    with pytest.raises(NotFoundError):
        await other.sessions.cancel("unknown", ANONYMOUS)


async def test_delete_ends_the_stream_and_frees_everything(pair, redis):
    one, other = pair
    request = request_of(max_tokens=1500)
    async with aclosing(one.generate(request)) as stream:
        await first_tokens(stream)
        assert await other.sessions.delete(request.session_id, ANONYMOUS)
        with pytest.raises(NotFoundError, match="deleted or has expired"):
            await rest_of(stream)
    await one.leases.settled()
    assert not await other.sessions.delete(request.session_id, ANONYMOUS)
    assert await redis.exists(*Keys().of(request.session_id)[:3]) == 0
    assert request.session_id not in [info.session_id for info in await one.sessions.recent(9, ANONYMOUS)]
    assert await sessions_on(one, 0) == 0


@pytest.mark.slow
@pytest.mark.nightly
async def test_reaper_frees_the_caches_of_a_dead_owner(pair, redis, monkeypatch):
    one, other = pair
    renew, thaw = one.store.renew, asyncio.Event()

    async def frozen_renew(*args):
        await thaw.wait()
        await renew(*args)

    monkeypatch.setattr(one.store, "renew", frozen_renew)
    request = request_of(max_tokens=1500)
    stream = one.generate(request)
    chunks = [await anext(stream) for _ in range(3)]
    # The owner freezes: no more signs of life, not even when its cycle ahead finds the caches gone, and its
    # lease is over.
    key = f"gammaray:session:{{{request.session_id}}}"
    await redis.hset(key, "lease", round((time.time() - 1) * 1e3))
    await other.leases.reap_all()
    info, _ = await other.sessions.get(request.session_id, ANONYMOUS)
    assert info.state is SessionState.DETACHED
    assert request.session_id not in await other.store.running()
    thaw.set()
    # It was only slow: it feeds the workers again and continues.
    chunks.append(await anext(stream))
    await stream.aclose()
    await one.leases.settled()
    rest = await complete(other, dataclasses.replace(resumed(request, chunks)))
    assert tokens_of(chunks + rest) == tokens_of(await complete(one, undisturbed(request)))


async def test_sessions_of_another_tenant_are_not_found(pair):
    one, _ = pair
    alice, bob = Caller("alice"), Caller("bob")
    request = request_of(max_tokens=3)
    (*_, last) = await complete(one, request, alice)
    assert last.session_id == request.session_id
    await one.leases.settled()
    info, _ = await one.sessions.get(request.session_id, alice)
    assert info.session_id == request.session_id
    assert [info.session_id for info in await one.sessions.recent(5, alice)] == [request.session_id]
    assert await one.sessions.recent(5, bob) == []
    for stranger in (bob, ANONYMOUS):
        for call in (one.sessions.get, one.sessions.trace, one.sessions.cancel):
            with pytest.raises(NotFoundError):
                await call(request.session_id, stranger)
        assert not await one.sessions.delete(request.session_id, stranger)
        for fields in ({"prompt": "", "resume_from": 0}, {"turn": 1}):
            with pytest.raises(NotFoundError):
                await anext(one.generate(dataclasses.replace(request, **fields), stranger))
    assert await one.sessions.delete(request.session_id, alice)
