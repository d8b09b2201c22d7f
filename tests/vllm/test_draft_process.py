"""A draft worker on vLLM as a process, with an orchestrator and a target on the CPU engine."""

import asyncio
import signal
from contextlib import AsyncExitStack

import pytest

from gammaray.types import DrafterKind, GammaPolicy, GenerationRequest, SamplingParams
from tests.support.workers.process_helpers import spawned
from tests.support.workers.redis_helpers import running_redis
from tests.support.workers.service_helpers import PROMPTS, SEEDED, complete, running, tokens_of

pytestmark = pytest.mark.integration

EXIT_TIMEOUT_S = 60
VLLM = ("--model", "demo", "--target", "demo", "--engine", "vllm", "--cache-budget-mb", 64)
KILLED_AFTER = 8
"""Chunks of a stream."""


def requests(gamma: int) -> list[GenerationRequest]:
    sampled = [SamplingParams(temperature=0, seed=1), SEEDED]
    return [
        GenerationRequest(
            PROMPTS[0],
            sampling=sampling,
            max_tokens=40,
            ignore_eos=True,
            gamma=GammaPolicy(gamma),
            drafter=DrafterKind.MODEL,
        )
        for sampling in sampled
    ]


@pytest.mark.timeout(400)
async def test_text_is_that_of_plain_decoding_with_a_draft_worker_on_vllm_and_after_its_kill():
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(running_redis())
        (_, target), (process, draft) = await asyncio.gather(
            stack.enter_async_context(spawned("target", "--model", "demo", "--engine", "native")),
            stack.enter_async_context(spawned("draft", *VLLM)),
        )
        async with running(redis, target, draft, propose_timeout_s=20) as orchestrator:
            plain = [tokens_of(await complete(orchestrator, request)) for request in requests(0)]
            answers = await asyncio.gather(
                *(complete(orchestrator, request) for request in requests(4) for _ in range(3))
            )
            assert [tokens_of(chunks) for chunks in answers] == [plain[0]] * 3 + [plain[1]] * 3
            for chunks in answers:
                summary = chunks[-1].summary
                assert summary.drafted_tokens > 20
                assert summary.accepted_tokens > 0.3 * summary.drafted_tokens

            def kill(count: int) -> None:
                if count == KILLED_AFTER:
                    process.kill()

            chunks = await complete(orchestrator, requests(4)[1], kill)
            assert tokens_of(chunks) == plain[1]
            assert await asyncio.wait_for(process.wait(), EXIT_TIMEOUT_S) == -signal.SIGKILL
