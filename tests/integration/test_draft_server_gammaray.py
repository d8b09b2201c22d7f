"""A second gammaray drafts over HTTP, with real engines: equal tokens, and its death costs only speed."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager

import pytest

from gammaray.demo_pair import resolve_model
from gammaray.types import DrafterKind, GammaPolicy, GenerationRequest, SamplingParams, VerificationMethod
from tests.support.workers.draft_servers import served
from tests.support.workers.scripted_workers import until
from tests.support.workers.service_helpers import PROMPTS, complete, running, tokens_of, worker_process

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NUM_TOKENS = 48
NAMES = (f"drafted-{number}" for number in itertools.count())
LONG_PROMPT = 'def read_lines(path):\n    """Return the lines of a file."""\n' * 12


@pytest.fixture(scope="module")
def targets():
    """Addresses of a target worker with the demo pair's target, and of one with its draft model."""
    with (
        worker_process("target") as (_, target),
        worker_process("target", resolve_model("demo", "draft")) as (_, small),
    ):
        yield target, small


@asynccontextmanager
async def pair(redis_server, targets):
    """Yield an orchestrator, and the API of the second gammaray, which drafts for it."""
    target, small = targets
    async with (
        running(redis_server, small, "", model=resolve_model("demo", "draft")) as second,
        served(second) as api,
    ):
        settings = {"draft_server": api.url, "propose_timeout_s": 30.0}
        async with running(redis_server, target, "", **settings) as orchestrator:
            yield orchestrator, api


def request_of(gamma, temperature, prompt=PROMPTS[0], **fields):
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "drafter": DrafterKind.SERVER, **fields}
    return GenerationRequest(
        prompt,
        sampling=SamplingParams(temperature=temperature, seed=1234),
        gamma=GammaPolicy(gamma),
        session_id=next(NAMES),
        **fields,
    )


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[1], LONG_PROMPT])
@pytest.mark.parametrize(
    ("method", "temperature", "least"),
    [
        (VerificationMethod.COUPLED, 0.0, 0.5),
        (VerificationMethod.COUPLED, 1.0, 0.5),
        (VerificationMethod.NAIVE, 1.0, 0.0),
    ],
)
async def test_tokens_equal_those_of_gamma_0(redis_server, targets, method, temperature, least, prompt):
    async with pair(redis_server, targets) as (orchestrator, _):
        plain = await complete(orchestrator, request_of(0, temperature, prompt, verification=method))
        chunks = await complete(orchestrator, request_of(4, temperature, prompt, verification=method))
        assert tokens_of(chunks) == tokens_of(plain)
        summary = chunks[-1].summary
        assert summary.server_cycles > 0
        assert summary.fallback_cycles == 0
        assert summary.acceptance_rate > least
        (process,) = (process for process in await orchestrator.status() if process.role == "draft")
        assert (process.model, process.kernel) == ("gammaray: draft", "token ids")


async def test_adaptive_gamma_and_look_ups_beside_the_server_change_no_token(redis_server, targets):
    async with pair(redis_server, targets) as (orchestrator, _):
        plain = await complete(orchestrator, request_of(0, 1.0, LONG_PROMPT))
        for _ in range(2):
            request = request_of(None, 1.0, LONG_PROMPT, drafter=DrafterKind.MODEL)
            assert tokens_of(await complete(orchestrator, request)) == tokens_of(plain)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_death_in_the_middle_of_a_stream_costs_only_speed(redis_server, targets, temperature):
    async with pair(redis_server, targets) as (orchestrator, api):
        plain = tokens_of(await complete(orchestrator, request_of(0, temperature)))
        chunks = []
        async for chunk in orchestrator.generate(request_of(4, temperature)):
            chunks.append(chunk)
            if len(chunks) == 3:
                await api.stop()
        summary = chunks[-1].summary
        assert tokens_of(chunks) == plain
        assert summary.server_cycles > 0
        assert summary.plain_cycles > 0
        assert summary.fallback_cycles > 0
        await api.start()
        await until(lambda: orchestrator.draft_server.is_usable)
        chunks = await complete(orchestrator, request_of(4, temperature))
        assert tokens_of(chunks) == plain
        assert chunks[-1].summary.fallback_cycles == 0
