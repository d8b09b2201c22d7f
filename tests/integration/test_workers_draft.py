"""The draft worker over its real stream: what it proposes, when it stops, what it feeds."""

import asyncio
import time

import pytest

from gammaray.types import SamplingParams, VerificationMethod
from gammaray.v1 import types_pb2 as types
from gammaray.wire.blocks import proposal_from_proto
from services.speculation.proposals import RUN
from tests.support.engine_helpers import plain_logits, plain_model, random_tokens
from tests.support.workers.held_engine import HeldEngine, all_read
from tests.support.workers.workers_helpers import ANSWER_TIMEOUT_S, propose_block, running, spec_message

pytestmark = pytest.mark.integration

PROMPT = random_tokens(12, seed=3)
CANCELLED = 1
WARM = SamplingParams(temperature=1.0, seed=11)
SETTINGS = (
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "presence_penalty": 0.5},
)
"""Of the sessions of one step, in turn."""


@pytest.fixture
async def draft(model):
    async with running("draft", model) as (link, _):
        yield link


def greedy(model, tokens, count):
    plain, tokens = plain_model(model), list(tokens)
    for _ in range(count):
        tokens.append(int(plain_logits(plain, tokens)[-1].argmax()))
    return tokens[-count:]


@pytest.mark.parametrize(
    ("num_accepted", "num_lacking"), [(6, 2), (5, 1), (2, 1), (0, 1)], ids=["all", "most", "some", "none"]
)
async def test_next_proposal_feeds_only_missing_tokens(model, num_accepted, num_lacking):
    async with running("draft", model, draft_ahead=False) as (sober, _):  # it prepares nothing
        proposed = list((await sober.ask(propose_block(PROMPT, 6))).proposal.token_ids)
        unforeseen = (
            greedy(model, [*PROMPT, *proposed], 1) if num_accepted == 6 else proposed[num_accepted:]
        )[0]
        tokens = [*PROMPT, *proposed[:num_accepted], (unforeseen + 1) % 97]
        context = types.TokenSpan(start=len(PROMPT), token_ids=tokens[len(PROMPT) :])
        block = propose_block(tokens, 3, context=context)
        block.ClearField("spec")
        result = await sober.ask(block)
        assert (result.num_forwards, result.timing.batch_tokens) == (3, num_lacking + 2)
        assert list(result.proposal.token_ids) == greedy(model, tokens, 3)


async def test_rejection_sends_the_distribution_of_each_token(draft):
    spec = spec_message(WARM, VerificationMethod.REJECTION)
    result = await draft.ask(propose_block(PROMPT, 5, spec=spec))
    proposal = proposal_from_proto(result.proposal, 97)
    assert len(proposal.draft_distributions) == 5
    for token_id, distribution in zip(proposal.token_ids, proposal.draft_distributions, strict=True):
        assert token_id in distribution.token_ids
        assert distribution.weight_bits == 12
        assert len(distribution.token_ids) <= 64


@pytest.mark.parametrize("method", list(VerificationMethod))
async def test_same_block_again_gives_the_same_proposal(draft, method):
    block = propose_block(PROMPT, 6, spec=spec_message(WARM, method))
    first, again = await draft.ask(block), await draft.ask(block)
    assert len(first.proposal.token_ids) == 6
    assert first.proposal == again.proposal


async def test_many_sessions_draft_in_lock_step_what_each_drafts_alone(draft):
    prompts = [random_tokens(4 + index % 9, seed=index) for index in range(24)]

    def block(name, index):
        spec = spec_message(SamplingParams(seed=index, **SETTINGS[index % len(SETTINGS)]))
        return propose_block(prompts[index], 1 + index % 8, session_id=f"{name}{index}", spec=spec)

    alone = [await draft.ask(block("a", index)) for index in range(24)]
    for name in "bcd":  # a worker's first steps are small, until it knows its time per token
        together = await draft.ask(*(block(name, index) for index in range(24)))
        assert [list(r.proposal.token_ids) for r in together] == [list(r.proposal.token_ids) for r in alone]
    assert max(r.timing.batch_size for r in together) == 24
    assert [r.num_forwards for r in together] == [1 + index % 8 for index in range(24)]


async def test_short_proposals_are_answered_before_long_ones(draft):
    long, short = await draft.send([propose_block(PROMPT, 64), propose_block(PROMPT, 1, session_id="t")])
    answered = []
    long.add_done_callback(lambda _: answered.append("long"))
    short.add_done_callback(lambda _: answered.append("short"))
    await asyncio.wait([long, short], timeout=ANSWER_TIMEOUT_S)
    assert len(long.result().proposal.token_ids) == 64
    assert answered == ["short", "long"]


async def test_release_cancels_a_running_proposal(model):
    async with running("draft", model) as (draft, worker):
        async with HeldEngine(worker) as engine:
            (waiting,) = await draft.send([propose_block(PROMPT, 64)])
            await engine.waits()
            await draft.release("s")
            await all_read(draft)
        assert (await asyncio.wait_for(waiting, ANSWER_TIMEOUT_S)).error.code == CANCELLED
        assert len(engine.forwards) == RUN, "the call of the engine that ran is the last one"
        assert (await draft.info()).num_sessions == 0


@pytest.mark.parametrize("method", sorted(set(VerificationMethod) - {VerificationMethod.COUPLED}))
async def test_other_methods_never_get_a_tree(draft, method):
    block = propose_block(PROMPT, 3, max_nodes=12, spec=spec_message(SamplingParams(seed=4), method))
    proposal = (await draft.ask(block)).proposal
    assert len(proposal.token_ids) == 3
    assert not proposal.parents


async def test_idle_worker_sleeps_when_its_ahead_work_is_done(model):
    def cpu_s(scheduler):
        return time.thread_time(), scheduler.queue.meter.ahead.forwards

    async with running("draft", model) as (draft, worker):
        for index in range(4):
            await draft.ask(propose_block(PROMPT, 6, max_nodes=12 * (index % 2), session_id=str(index)))
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while await worker.engine.call(lambda scheduler: scheduler.has_work):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        (began, forwards), _ = await worker.engine.call(cpu_s), await asyncio.sleep(0.5)
        ended, forwards_now = await worker.engine.call(cpu_s)
        assert ended - began < 0.05
        assert forwards == forwards_now > 0
