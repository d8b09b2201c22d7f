"""The orchestrator end to end: real worker processes with the demo pair, real Redis, no Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import time
from contextlib import aclosing, asynccontextmanager, contextmanager

import pytest
from redis_helpers import running_redis
from scripted_workers import scripted, until

from gammaray.config import OrchestratorSettings
from gammaray.errors import (
    FailedPreconditionError,
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
from orchestrator.service import Orchestrator
from orchestrator.store import RedisStore
from orchestrator.tokenizer import resolve_model

pytestmark = pytest.mark.integration

PROMPTS = ["def read_lines(path):\n", "import os\n\nclass Stack:\n    def ", "for i in range(", "# A short"]
SEEDED = SamplingParams(temperature=1.0, seed=1234)
GREEDY = SamplingParams(temperature=0.0, seed=0)
BIASED = SamplingParams(logit_bias={2048: 1.0})
NOT_A_NUMBER = SamplingParams(temperature=float("nan"))


@contextmanager
def worker_process(role: str):
    """Run a worker with the demo pair; yields its process and address."""
    command = [sys.executable, "-m", f"services.{role}", "--model", "demo", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def redis_server():
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def workers():
    with worker_process("target") as (_, target), worker_process("draft") as (_, draft):
        yield target, draft


@asynccontextmanager
async def running(server, target: str, draft: str, **settings):
    orchestrator = await Orchestrator.start(
        OrchestratorSettings(redis_url=server.url, target_addresses=target, draft_addresses=draft, **settings)
    )
    try:
        yield orchestrator
    finally:
        await orchestrator.close()


@pytest.fixture
async def orchestrator(redis_server, workers):
    async with running(redis_server, *workers) as orchestrator:
        yield orchestrator


async def complete(orchestrator, request: GenerationRequest, after_chunk=lambda count: None):
    """Return all chunks of a completion; `after_chunk` is told how many came so far."""
    chunks = []
    async for chunk in orchestrator.generate(request):
        chunks.append(chunk)
        after_chunk(len(chunks))
    return chunks


def tokens_of(chunks) -> list[int]:
    return [token.token_id for chunk in chunks for token in chunk.tokens]


def text_of(chunks) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("params", [SEEDED, GREEDY], ids=["temperature-1", "greedy"])
async def test_service_tokens_do_not_depend_on_gamma_drafter_or_company(orchestrator, params):
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


async def test_service_greedy_equals_transformers_generate(orchestrator):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(resolve_model("demo"), dtype=torch.float32)
    for prompt in PROMPTS:
        token_ids = orchestrator.encode(prompt)
        ids = torch.tensor([token_ids])
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=48)[
            0, len(token_ids) :
        ].tolist()
        request = GenerationRequest(tuple(token_ids), sampling=GREEDY, max_tokens=48)
        assert tokens_of(await complete(orchestrator, request)) == wanted


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
    assert usage.prompt_tokens == len(orchestrator.encode(PROMPTS[0]))
    assert usage.accepted_prediction_tokens == accepted > 0
    drafted = usage.accepted_prediction_tokens + usage.rejected_prediction_tokens
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
    assert text_of(chunks) == orchestrator.decode(shown)


async def test_service_seed_is_drawn_returned_and_repeats_the_completion(orchestrator):
    first, second = [
        await complete(orchestrator, GenerationRequest(PROMPTS[0], max_tokens=20)) for _ in range(2)
    ]
    assert first[0].seed != second[0].seed
    params = SamplingParams(seed=first[0].seed)
    again = await complete(orchestrator, GenerationRequest(PROMPTS[0], max_tokens=20, sampling=params))
    assert tokens_of(again) == tokens_of(first)
    assert tokens_of(first) != tokens_of(second)


async def test_service_stop_string_cuts_text_tokens_and_store(orchestrator):
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
        assert stop in orchestrator.decode(tokens)
        assert stop not in orchestrator.decode(tokens[:-1])
        stored = await RedisStore(orchestrator._redis, 60).read(f"stop-{gamma}")
        assert list(stored.token_ids) == tokens
        assert stored.finish_reason is FinishReason.STOP


async def test_service_tokens_are_stored_before_they_are_seen(orchestrator):
    store, seen = RedisStore(orchestrator._redis, 60), []
    request = GenerationRequest(PROMPTS[0], max_tokens=30, session_id="watched")
    async for chunk in orchestrator.generate(request):
        seen += [token.token_id for token in chunk.tokens]
        assert list((await store.read("watched")).token_ids[: len(seen)]) == seen
    with pytest.raises(FailedPreconditionError, match="watched exists already"):
        await complete(orchestrator, request)


async def test_service_logprobs_belong_to_their_tokens(orchestrator):
    request = GenerationRequest(PROMPTS[0], sampling=GREEDY, max_tokens=12, num_top_logprobs=3)
    for chunk in await complete(orchestrator, request):
        for token in chunk.tokens:
            assert len(token.top_logprobs) == 3
            assert token.top_logprobs[0].token_id == token.token_id
            assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)
            assert token.logprob <= 0
            assert token.top_logprobs[0].token_bytes == token.token_bytes


async def test_service_completion_ends_at_the_context(orchestrator):
    prompt = tuple([5] * (orchestrator.max_context - 6))
    request = GenerationRequest(prompt, sampling=GREEDY, max_tokens=100, ignore_eos=True)
    chunks = await complete(orchestrator, request)
    assert len(tokens_of(chunks)) == 6
    assert chunks[-1].finish_reason is FinishReason.LENGTH


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
async def test_service_bad_request_is_refused_and_leaves_nothing(orchestrator, fields, error, wanted):
    keys = await orchestrator._redis.dbsize()
    with pytest.raises(error, match=wanted):
        await complete(orchestrator, dataclasses.replace(GenerationRequest("x", max_tokens=4), **fields))
    assert await orchestrator._redis.dbsize() == keys
    assert orchestrator._num_active == 0


async def sessions_on_workers(orchestrator) -> int:
    """Ask the workers themselves how many sessions they hold."""
    total = 0
    for pool in (orchestrator._fleet.targets, orchestrator._fleet.drafts):
        for link in pool.links.values():
            async with link_channel(link) as channel:
                total += (await pool._protocol.get_info(channel, 5.0)).num_sessions
    return total


@asynccontextmanager
async def link_channel(link):
    import grpc

    async with grpc.aio.insecure_channel(link.address) as channel:
        yield channel


@pytest.mark.parametrize("how", ["closed", "cancelled", "finished"])
async def test_service_ended_request_frees_the_workers(orchestrator, how):
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
        assert await sessions_on_workers(orchestrator) >= 2
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    deadline = time.monotonic() + 10
    while await sessions_on_workers(orchestrator) > 0:
        assert time.monotonic() < deadline, "the workers still hold the session"
        await asyncio.sleep(0.05)
    await asyncio.gather(*orchestrator._tasks)
    stored = await RedisStore(orchestrator._redis, 60).read(name)
    wanted = FinishReason.LENGTH if how == "finished" else FinishReason.CANCELLED
    assert stored.finish_reason is wanted
    assert orchestrator._num_active == 0


async def test_service_too_many_requests_are_refused_with_a_delay(redis_server, workers):
    async with running(redis_server, *workers, max_concurrent_requests=2) as orchestrator:
        request = GenerationRequest(PROMPTS[0], max_tokens=500, ignore_eos=True)
        async with aclosing(orchestrator.generate(request)) as one:
            async with aclosing(orchestrator.generate(request)) as two:
                await anext(one)
                await anext(two)
                with pytest.raises(ResourceExhaustedError, match="2 requests") as refused:
                    await complete(orchestrator, request)
                assert refused.value.retry_after_s > 0
        assert await complete(orchestrator, dataclasses.replace(request, max_tokens=2))


async def test_service_without_a_draft_worker_decodes_plainly(redis_server, workers):
    async with running(redis_server, workers[0], "") as orchestrator:
        plain = [{"drafter": DrafterKind.NONE}, {"gamma": GammaPolicy(0)}]
        for fields in (*plain, {"gamma": GammaPolicy(4)}, {"gamma": ADAPTIVE}):
            request = GenerationRequest(PROMPTS[0], sampling=SEEDED, max_tokens=10, **fields)
            chunks = await complete(orchestrator, request)
            assert len(tokens_of(chunks)) == chunks[-1].summary.cycles == 10
            assert chunks[-1].summary.alpha is None


async def test_service_status_names_every_process(orchestrator, workers, redis_server):
    status = {process.role: process for process in await orchestrator.status()}
    assert sorted(status) == ["draft", "orchestrator", "redis", "target"]
    assert all(process.healthy and process.pid > 0 for process in status.values())
    assert status["orchestrator"].pid == os.getpid()
    assert status["redis"].pid == redis_server.pid
    assert (status["target"].address, status["draft"].address) == workers
    assert status["target"].model == "demo"


async def test_service_draft_worker_killed_in_flight_changes_no_token(redis_server, workers):
    request = GenerationRequest(
        PROMPTS[1], sampling=SEEDED, max_tokens=300, ignore_eos=True, gamma=GammaPolicy(4)
    )
    with worker_process("draft") as (process, draft):
        async with running(redis_server, workers[0], draft) as orchestrator:
            chunks = await complete(
                orchestrator, request, lambda count: process.kill() if count == 5 else None
            )
            draft_status = [p for p in await orchestrator.status() if p.role == "draft"]
            assert not any(p.healthy for p in draft_status)
            plain = await complete(orchestrator, dataclasses.replace(request, drafter=DrafterKind.NONE))
    assert tokens_of(chunks) == tokens_of(plain)
    early = [token for chunk in chunks[:5] for token in chunk.tokens]
    assert any(token.origin is TokenOrigin.ACCEPTED for token in early)
    assert len(chunks[-1].tokens) == 1


async def test_service_target_killed_and_gone_is_unavailable(redis_server):
    with worker_process("target") as (process, target):
        async with running(redis_server, target, "", worker_wait_s=0.5) as orchestrator:
            request = GenerationRequest(PROMPTS[0], max_tokens=1000, ignore_eos=True)
            with pytest.raises(UnavailableError, match="no target worker"):
                await complete(orchestrator, request, lambda count: process.kill())


async def test_service_start_refuses_a_draft_of_another_vocabulary(redis_server, workers):
    async with scripted("draft", vocab_size=999) as draft:
        with pytest.raises(InvalidArgumentError, match=r"999 token ids.*2048 token ids"):
            async with running(redis_server, workers[0], draft.address):
                pass


async def test_service_start_without_redis_is_unavailable():
    with pytest.raises(UnavailableError, match="Redis"):
        await Orchestrator.start(OrchestratorSettings(redis_url="redis://127.0.0.1:1/0"))


async def test_service_start_with_an_unknown_model_names_it(redis_server):
    with pytest.raises(InvalidArgumentError, match="no/such-model"):
        await Orchestrator.start(OrchestratorSettings(redis_url=redis_server.url, model="no/such-model"))


async def test_service_redis_dies_the_request_fails_and_the_workers_are_freed(workers):
    with running_redis() as server:
        async with running(server, *workers) as orchestrator:
            request = GenerationRequest(PROMPTS[0], max_tokens=1000, ignore_eos=True)
            with pytest.raises(UnavailableError, match="Redis"):
                await complete(orchestrator, request, lambda count: server.stop())
            (redis_status,) = [p for p in await orchestrator.status() if p.role == "redis"]
            assert not redis_status.healthy
            await until(lambda: not any(link.sessions for link in orchestrator._fleet.targets.links.values()))
