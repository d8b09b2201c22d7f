"""Draft-ahead and trees over real streams: the same tokens, sooner, and no work when idle."""

import asyncio
import itertools
import random
import time

import pytest
import torch

from gammaray.types import SamplingParams, VerificationMethod
from tests.support.engine_helpers import plain_model, random_tokens, tiny_model
from tests.support.workers.held_engine import HeldEngine, all_read
from tests.support.workers.workers_helpers import (
    ANSWER_TIMEOUT_S,
    Driver,
    propose_block,
    running,
    spec_message,
)

pytestmark = pytest.mark.integration

# Sizes that deterministic mode supports: with it proposals are bit-identical, distributions included.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "max_position_embeddings": 256}
PROMPT = random_tokens(12, seed=3)
LENGTH = 40
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
    """Wait until the worker has nothing left to do."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while await worker.engine.call(lambda scheduler: scheduler.has_work):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.2])
async def test_trees_give_the_tokens_of_plain_decoding(pair, temperature):
    target, draft, _ = pair
    penalties = {"frequency_penalty": 0.6, "repetition_penalty": 1.1, "min_tokens": 9}
    accepted = 0
    for number, extra in enumerate(({}, penalties)):
        params = SamplingParams(temperature=temperature, seed=7, **extra)
        common = {"prompt": PROMPT, "params": params, "eos_token_ids": (5,)}
        plain = await Driver(target, None, **common, session_id=f"plain{number}").generate(LENGTH)
        for gamma, max_nodes in (*SHAPES, (4, 0)):
            driver = Driver(
                target,
                draft,
                **common,
                gamma=gamma,
                max_nodes=max_nodes,
                session_id=f"{gamma}-{max_nodes}-{number}",
            )
            assert await driver.generate(LENGTH) == plain
            accepted += driver.accepted
    assert accepted > 20


async def test_tree_has_the_shape_that_was_asked_for(pair):
    _, draft, _ = pair
    spec = spec_message(SamplingParams(temperature=5.0, seed=4))
    for index, (gamma, max_nodes) in enumerate(SHAPES):
        block = propose_block(PROMPT, gamma, max_nodes=max_nodes, session_id=str(index), spec=spec)
        proposal = (await draft.ask(block)).proposal
        assert gamma < len(proposal.token_ids) <= max_nodes
        depths = []
        for parent in proposal.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        assert max(depths) <= gamma


async def test_other_methods_never_get_a_tree(pair):
    _, draft, _ = pair
    for method in set(VerificationMethod) - {VerificationMethod.COUPLED}:
        spec = spec_message(SamplingParams(seed=4), method)
        block = propose_block(PROMPT, 3, max_nodes=12, session_id=method.value, spec=spec)
        proposal = (await draft.ask(block)).proposal
        assert len(proposal.token_ids) == 3
        assert not proposal.parents


@pytest.mark.slow
@pytest.mark.parametrize("method", list(VerificationMethod))
async def test_ahead_on_and_off_emit_the_same_tokens(models, method):
    """Rejection and naive included: their proposals and distributions are the same."""
    settings = {"deterministic": True}
    async with (
        running("target", models[0], **settings) as (target, _),
        running("draft", models[1], **settings) as (ahead, worker),
        running("draft", models[1], **settings, draft_ahead=False) as (fresh, _),
    ):
        for seed in range(3):
            emitted = []
            for draft in (ahead, fresh):
                params = SamplingParams(temperature=0.8, seed=seed)
                name = f"{seed}-{len(emitted)}"
                driver = Driver(
                    target, draft, PROMPT, params, method, gamma=3, session_id=name, keep_proposals=True
                )
                emitted.append((await driver.generate(LENGTH), driver.proposals))
            assert emitted[0] == emitted[1]
        assert (await stats(worker)).forwards > 5
        assert (await stats(worker)).lookups > 20


async def test_hit_needs_no_forward(pair):
    _, draft, worker = pair
    for index, params in enumerate((SamplingParams(temperature=0.0, seed=1), SamplingParams(seed=2))):
        spec = spec_message(params)
        longer = await draft.ask(propose_block(PROMPT, 4, session_id=f"long{index}", spec=spec))
        await draft.ask(propose_block(PROMPT, 3, session_id=f"s{index}", spec=spec))
        await quiet(worker)
        tokens = [*PROMPT, *longer.proposal.token_ids]  # all accepted, and the draft's own bonus
        hit = await draft.ask(propose_block(tokens, 3, session_id=f"s{index}", spec=spec))
        assert hit.num_forwards == 0
        assert hit.timing.forward_us == 0
        miss = await draft.ask(propose_block(tokens, 3, session_id=f"new{index}", spec=spec))
        assert miss.num_forwards > 0
        assert hit.proposal == miss.proposal
    assert (await stats(worker)).hits == 2


async def test_new_block_preempts_ahead_work_within_a_forward(models, monkeypatch):
    monkeypatch.setattr("services.draft.worker.AHEAD_ROWS", 1)
    async with running("draft", models[1]) as (draft, worker):
        async with HeldEngine(worker, after=61) as engine:
            (long,) = await draft.send([propose_block(PROMPT, 60)])
            await engine.waits()
            assert (await asyncio.wait_for(long, ANSWER_TIMEOUT_S)).num_forwards == 60
            (new,) = await draft.send([propose_block(PROMPT, 2, session_id="t")])
            await all_read(draft)
            engine.let_go()
            assert (await asyncio.wait_for(new, ANSWER_TIMEOUT_S)).num_forwards == 2
        # It came during the first forward ahead, and none of the many others was before it.
        assert engine.forwards[:63] == [["s"]] * 61 + [["t"]] * 2


async def test_release_during_draft_ahead_frees_everything(models, monkeypatch):
    monkeypatch.setattr("services.draft.worker.AHEAD_ROWS", 1)
    async with running("draft", models[1]) as (draft, worker):
        for name in "stu":
            await draft.ask(propose_block(PROMPT, 60, session_id=name))
        await draft.release(*"stu")
        await draft.until(lambda info: info.num_sessions == 0)
        assert (await draft.info()).cache_bytes == 0
        assert not await worker.engine.call(lambda scheduler: scheduler.has_work)


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


async def test_draft_ahead_in_a_full_cache_changes_no_proposal(models):
    """Sessions that take turns in a cache for some of them: no answer suffers."""
    async with (
        running("draft", models[1], cache_budget_mb=1) as (small, worker),
        running("draft", models[1], draft_ahead=False) as (large, _),
    ):
        rng, contexts = random.Random(1), [random_tokens(150 + i, seed=i) for i in range(12)]
        for _, index in itertools.product(range(3), range(12)):
            block = propose_block(contexts[index], 4, session_id=str(index))
            ours, theirs = await small.ask(block), await large.ask(block)
            assert ours.proposal == theirs.proposal
            contexts[index] += [*theirs.proposal.token_ids[: rng.randrange(5)], rng.randrange(97)]
        assert await worker.engine.call(lambda scheduler: scheduler.engine.stats().num_evictions) > 0
