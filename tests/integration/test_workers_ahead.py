"""Draft-ahead and trees over real streams: the same tokens, sooner, and no work when idle."""

import asyncio
import time

import pytest
import torch

from gammaray.types import SamplingParams, VerificationMethod
from tests.support.engine_helpers import plain_model, random_tokens, tiny_model
from tests.support.workers.workers_helpers import (
    ANSWER_TIMEOUT_S,
    accepted_in_plain_tokens,
    propose_block,
    running,
    spec_message,
)

pytestmark = pytest.mark.integration

# Sizes that deterministic mode supports: with it proposals are bit-identical, distributions included.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "max_position_embeddings": 256}
PROMPT = random_tokens(12, seed=3)
SHAPES = [(1, 3), (3, 8), (4, 12), (6, 40)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("ahead")
    directory = tiny_model("llama", path, seed=1, **SIZES)
    model = plain_model(directory)
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)  # as sure of itself as a trained model
    model.save_pretrained(directory)
    # The draft agrees with its target often, and not always.
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    model.save_pretrained(path / "draft")
    return directory, path / "draft"


@pytest.fixture
async def pair(models):
    async with running("target", models[0]) as (target, _), running("draft", models[1]) as (draft, worker):
        yield target, draft, worker


async def stats(worker):
    return await worker.engine.call(lambda scheduler: scheduler.lookahead.stats)


async def quiet(worker):
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while await worker.engine.call(lambda scheduler: scheduler.has_work):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.2])
async def test_trees_give_the_tokens_of_plain_decoding(pair, temperature):
    target, draft, _ = pair
    assert await accepted_in_plain_tokens(target, draft, PROMPT, temperature, (*SHAPES, (4, 0))) > 20


async def test_other_methods_never_get_a_tree(pair):
    _, draft, _ = pair
    for method in set(VerificationMethod) - {VerificationMethod.COUPLED}:
        spec = spec_message(SamplingParams(seed=4), method)
        block = propose_block(PROMPT, 3, max_nodes=12, session_id=method.value, spec=spec)
        proposal = (await draft.ask(block)).proposal
        assert len(proposal.token_ids) == 3
        assert not proposal.parents


async def test_idle_worker_sleeps_when_its_ahead_work_is_done(pair):
    _, draft, worker = pair
    for index in range(4):
        await draft.ask(propose_block(PROMPT, 6, max_nodes=12 * (index % 2), session_id=str(index)))
    await quiet(worker)

    def cpu_s(scheduler):
        return time.thread_time(), scheduler.lookahead.stats.forwards

    (began, forwards), _ = await worker.engine.call(cpu_s), await asyncio.sleep(0.5)
    ended, forwards_now = await worker.engine.call(cpu_s)
    assert ended - began < 0.05
    assert forwards == forwards_now
