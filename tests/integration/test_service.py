"""The orchestrator without Ray, on the demo pair or scripted workers, and a real Redis; its failures."""

import asyncio
import math
import time
from contextlib import asynccontextmanager
from dataclasses import replace
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
from orchestrator import service
from orchestrator.access.caller import ANONYMOUS, Caller
from orchestrator.service import Orchestrator
from orchestrator.storage.keys import StoreBounds
from orchestrator.storage.session_store import RedisStore
from orchestrator.workers import verifier
from orchestrator.workers.early_blocks import EarlyBlocks
from tests.support.workers.redis_helpers import redis_name, running_redis
from tests.support.workers.resume_helpers import first_chunks, sessions_on
from tests.support.workers.scripted_workers import scripted, until, until_so
from tests.support.workers.service_helpers import (
    PROMPTS,
    SEEDED,
    announced,
    complete,
    first_tokens,
    rest_of,
    running,
    text_of,
    tokens_of,
    worker_process,
)

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
    assert (summary.cycles, sum(summary.accepted_lengths)) == (len(chunks), len(chunks))
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


async def test_service_completion_ends_at_the_context(orchestrator):
    prompt = tuple([5] * (orchestrator.max_context - 6))
    request = GenerationRequest(prompt, sampling=GREEDY, max_tokens=100, ignore_eos=True)
    chunks = await complete(orchestrator, request)
    assert len(tokens_of(chunks)) == 6
    assert chunks[-1].finish_reason is FinishReason.LENGTH


LONG = GenerationRequest(PROMPTS[0], max_tokens=1000, ignore_eos=True, drafter=DrafterKind.NONE)
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
            chunks = await complete(orchestrator, UNSTORED, caller)
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
        await complete(orchestrator, replace(GenerationRequest("x", max_tokens=4), **fields))
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
    async with running(redis_server, target.address, "", worker_wait_s=0.5) as orchestrator:
        stream = orchestrator.generate(LONG)
        await first_tokens(stream)
        await target.stop()
        with pytest.raises(UnavailableError, match="no target worker"):
            await rest_of(stream)


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
            stream = orchestrator.generate(LONG)
            await first_tokens(stream)
            server.stop()
            with pytest.raises(UnavailableError, match="Redis"):
                await rest_of(stream)
            (redis_status,) = [p for p in await orchestrator.status() if p.role == "redis"]
            assert not redis_status.healthy
            await until(lambda: target.released != [])


PLAIN = GenerationRequest(PROMPTS[0], max_tokens=60, gamma=GammaPolicy(0))


def sampled(seed, **fields):
    return replace(PLAIN, sampling=SamplingParams(temperature=1.0, seed=seed, **fields))


REQUESTS = [
    replace(PLAIN, sampling=SamplingParams(temperature=0.0, seed=0)),
    replace(sampled(1), num_top_logprobs=2),
    replace(sampled(2), prompt=PROMPTS[1], ignore_eos=True, max_tokens=100),
    sampled(3, top_p=0.9, frequency_penalty=0.7, min_tokens=20),
    replace(sampled(4), verification=VerificationMethod.NAIVE),
    *(replace(sampled(5), max_tokens=count) for count in (1, 2, 3)),
]


async def test_a_crowd_gets_the_tokens_that_each_request_gets_alone(orchestrator, monkeypatch):
    alone = [await complete(orchestrator, request) for request in REQUESTS]
    assert all(chunks[-1].summary.cycles == len(tokens_of(chunks)) for chunks in alone)
    stop = text_of(alone[0])[40:44]
    requests = [*REQUESTS, replace(REQUESTS[0], stop=(stop,))]
    alone.append(await complete(orchestrator, requests[-1]))
    monkeypatch.setattr(verifier, "CROWD", 1)
    together = await asyncio.gather(*(complete(orchestrator, request) for request in requests))
    for ours, theirs in zip(together, alone, strict=True):
        assert [token for chunk in ours for token in chunk.tokens] == [
            token for chunk in theirs for token in chunk.tokens
        ]
        assert text_of(ours) == text_of(theirs)
        assert ours[-1].finish_reason is theirs[-1].finish_reason
        assert ours[-1].usage == theirs[-1].usage
    assert together[-1][-1].finish_reason is FinishReason.STOP
    cycles, count = together[2][-1].summary.cycles, len(tokens_of(together[2]))
    assert cycles < count == 100


async def test_plain_cycles_between_proposals_are_decoded_ahead(orchestrator, monkeypatch):
    request = replace(
        REQUESTS[2], drafter=DrafterKind.SUFFIX, gamma=GammaPolicy(4), prompt="x = [1, 2, 1, 2, "
    )
    monkeypatch.setattr(verifier, "CROWD", 1)
    origins, seed = list[set[TokenOrigin]](), 0
    async with asyncio.timeout(60):
        # How many tokens a message has, and so a chunk, depends on the load.
        while {TokenOrigin.BONUS} not in origins or not any(TokenOrigin.ACCEPTED in one for one in origins):
            request = replace(request, sampling=replace(SEEDED, seed=(seed := seed + 1)))
            chunks = await complete(orchestrator, request)
            assert tokens_of(chunks) == tokens_of(
                await complete(orchestrator, replace(request, gamma=GammaPolicy(0)))
            )
            origins += [{token.origin for token in chunk.tokens} for chunk in chunks if len(chunk.tokens) > 1]


async def test_sessions_of_other_orchestrators_count_in_a_crowd(orchestrator, redis_server, monkeypatch):
    monkeypatch.setattr(verifier, "CROWD", 5)
    async with running(redis_server, "", "") as other:
        turns = [complete(one, REQUESTS[2]) for one in (orchestrator, other) for _ in range(4)]
        together = await asyncio.gather(*turns)
    assert len({tuple(tokens_of(chunks)) for chunks in together}) == 1
    assert min(chunks[-1].summary.cycles for chunks in together) < 100


async def test_a_stream_that_is_closed_leaves_nothing_on_the_worker(orchestrator, monkeypatch):
    monkeypatch.setattr(verifier, "CROWD", 1)
    stream = orchestrator.generate(replace(sampled(6), max_tokens=500, ignore_eos=True))
    await first_tokens(stream)
    await stream.aclose()
    (link,) = orchestrator.fleet.targets.links.values()
    assert not [*link.pending, *link.sessions, *link.listeners]
    again = replace(REQUESTS[2], max_tokens=30)
    assert tokens_of(await complete(orchestrator, again)) == tokens_of(
        await complete(orchestrator, replace(again, gamma=GammaPolicy(4)))
    )


async def test_blocks_for_likely_outcomes_reach_the_target_before_its_verdict(orchestrator, monkeypatch):
    takes, take = [], EarlyBlocks.take
    monkeypatch.setattr(EarlyBlocks, "take", lambda *given: takes.append(take(*given)) or takes[-1])
    for request in (REQUESTS[2], replace(REQUESTS[2], sampling=replace(SEEDED, temperature=0.0))):
        plain = await complete(orchestrator, request)
        assert not any(takes)
        async with asyncio.timeout(60):
            while not any(takes):  # on busy cores the draft worker is seldom in time
                drafted = await complete(orchestrator, replace(request, gamma=GammaPolicy(4)))
                assert tokens_of(drafted) == tokens_of(plain)
                assert text_of(drafted) == text_of(plain)
        takes.clear()
    (link,) = orchestrator.fleet.targets.links.values()
    assert not link.pending


async def test_a_draft_worker_and_a_head_both_draft_in_one_session(redis_server, workers):
    request = replace(REQUESTS[2], max_tokens=600)
    with worker_process("target", "demo", "--head", "demo") as (_, target):
        async with running(redis_server, target, workers[1], prefix_caching=False) as orchestrator:
            assert orchestrator.drafters[:2] == [DrafterKind.HEAD, DrafterKind.MODEL]
            plain = await complete(orchestrator, replace(request, gamma=GammaPolicy(0)))
            drafted = await complete(orchestrator, replace(request, gamma=ADAPTIVE))
            alone = await complete(orchestrator, replace(request, gamma=ADAPTIVE, drafter=DrafterKind.HEAD))
    assert tokens_of(drafted) == tokens_of(plain) == tokens_of(alone)
    assert drafted[-1].summary.head_cycles > 0
    assert drafted[-1].summary.model_cycles > 0
    assert alone[-1].summary.model_cycles == 0


SHORT = GenerationRequest("x = ", max_tokens=12, ignore_eos=True, drafter=DrafterKind.NONE)


@pytest.mark.slow
async def test_flood_is_rejected_with_a_delay_and_all_slots_are_freed(redis_server, target):
    settings = {"max_concurrent_requests": 3}
    async with running(redis_server, target.address, "", **settings) as orchestrator:
        results = await asyncio.wait_for(
            asyncio.gather(
                *(complete(orchestrator, SHORT, Caller("a")) for _ in range(20)), return_exceptions=True
            ),
            60,
        )
        refused = [result for result in results if isinstance(result, ResourceExhaustedError)]
        assert len(refused) == 14
        assert all(1 <= error.retry_after_s < math.inf for error in refused)
        assert sum(isinstance(result, list) for result in results) == 6
        assert (orchestrator.admission.num_running, orchestrator.admission.num_waiting) == (0, 0)
        assert await complete(orchestrator, SHORT, Caller("a"))


@pytest.mark.slow
async def test_deadline_ends_a_running_request_and_frees_its_slot(redis_server, target):
    target.delay_s = 0.1
    async with running(redis_server, target.address, "") as orchestrator:
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            await complete(orchestrator, LONG, Caller(deadline=time.monotonic() + 0.5))
        assert time.monotonic() - began < 25, "of the 100 that it would take"
        assert orchestrator.admission.num_running == 0


@pytest.mark.slow
async def test_deleting_sessions_frees_stored_bytes(redis_server, target, monkeypatch):
    monkeypatch.setattr(service, "StoreBounds", partial(StoreBounds, total=2**20, tenant_share=0.1))
    async with running(redis_server, target.address, "") as orchestrator:
        names = []

        async def fill():
            for _ in range(100):
                (*_, last) = await complete(orchestrator, SHORT, Caller("full"))
                names.append(last.session_id)

        with pytest.raises(ResourceExhaustedError, match=r"tenant full: .* of 104858 bytes") as refused:
            await fill()
        assert 10 < len(names) < 40
        assert 1 <= refused.value.retry_after_s <= 3600
        assert len(tokens_of(await complete(orchestrator, SHORT, Caller("other")))) == 12
        for name in names[:5]:
            assert await orchestrator.sessions.delete(name, Caller("full"))
        assert len(tokens_of(await complete(orchestrator, SHORT, Caller("full")))) == 12
        for caller in (Caller("full"), Caller("other")):
            for info in await orchestrator.sessions.recent(1000, caller):
                await orchestrator.sessions.delete(info.session_id, caller)
