"""The target's law with every verification method, through an orchestrator and vLLM's workers as processes.

gRPC, Redis and the orchestrator are those of a cluster; Ray, which hosts processes only, is left out.
"""

import asyncio
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from transformers import AutoModelForCausalLM

from gammaray.demo_pair import resolve_model
from gammaray.types import DrafterKind, GammaPolicy, GenerationRequest, SamplingParams, VerificationMethod
from tests.support.maths_loop_helpers import g_test
from tests.support.workers.redis_helpers import running_redis
from tests.support.workers.service_helpers import complete, running, tokens_of, worker_process

pytestmark = [pytest.mark.integration, pytest.mark.statistical, pytest.mark.timeout(400), pytest.mark.nightly]

PROMPT = (455, 832, 63, 1123, 8, 508, 309, 273, 334, 221)
ALLOWED = (337, 996, 85, 663, 49, 62)
"""Tokens after it that are about as likely as each other."""
TEMPERATURE = 1.0
NUM_SEEDS = 500
TILT = 0.3
ALPHA = 1e-4
VLLM = ("demo", "--engine", "vllm", "--cache-budget-mb", "64")


@torch.no_grad()
def pair_law() -> dict[tuple[int, int], float]:
    """Return the probabilities of two allowed tokens after the prompt, from transformers."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model("demo", "target"), dtype=torch.float64).eval()

    def after(*tokens: int) -> list[float]:
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1, list(ALLOWED)] / TEMPERATURE
        return logits.softmax(-1).tolist()

    pairs = zip(ALLOWED, after(), strict=True)
    return {(a, b): p * q for a, p in pairs for b, q in zip(ALLOWED, after(a), strict=True)}


def check_law(counts: Counter[tuple[int, int]], law: dict[tuple[int, int], float]) -> None:
    """Check that counts have a law, and not that whose likeliest outcome has another `TILT` of all."""
    assert set(counts) <= set(law)
    seen = [counts[outcome] for outcome in law]
    assert g_test(seen, list(law.values())) > ALPHA
    likely = max(law, key=lambda outcome: law[outcome])
    tilted = [prob + TILT * (outcome == likely) for outcome, prob in law.items()]
    assert g_test(seen, [prob / math.fsum(tilted) for prob in tilted]) < ALPHA


def request(method: VerificationMethod, seed: int) -> GenerationRequest:
    """Two tokens of three: the first cycle can draft both."""
    return GenerationRequest(
        PROMPT,
        sampling=SamplingParams(temperature=TEMPERATURE, seed=seed, allowed_token_ids=ALLOWED),
        max_tokens=3,
        ignore_eos=True,
        verification=method,
        gamma=GammaPolicy(2),
        drafter=DrafterKind.MODEL,
        cache_salt="one",
        store=False,
    )


async def test_two_tokens_over_many_seeds_have_the_targets_law_with_every_method():
    law = pair_law()
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        redis = stack.enter_context(running_redis())
        starts = worker_process("target", *VLLM), worker_process("draft", *VLLM, "--target", "demo")
        (_, target), (_, draft) = threads.map(stack.enter_context, starts)
        async with running(redis, target, draft, propose_timeout_s=20) as orchestrator:
            free = asyncio.Semaphore(50)

            async def one(method, seed):
                async with free:
                    return await complete(orchestrator, request(method, seed))

            for method in VerificationMethod:
                # Other seeds for each, so that the methods are tested on their own.
                first = NUM_SEEDS * list(VerificationMethod).index(method)
                seeds = range(first, first + NUM_SEEDS)
                answers = await asyncio.gather(*(one(method, seed) for seed in seeds))
                check_law(Counter(tuple(tokens_of(chunks)[:2]) for chunks in answers), law)
                summaries = [chunks[-1].summary for chunks in answers]
                drafted = sum(summary.drafted_tokens for summary in summaries)
                accepted = sum(summary.accepted_tokens for summary in summaries)
                assert sum(summary.model_cycles for summary in summaries) > 0.9 * NUM_SEEDS
                assert 0.1 * drafted < accepted < 0.95 * drafted
