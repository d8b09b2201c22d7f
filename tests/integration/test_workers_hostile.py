"""Blocks from broken or malicious peers: each gets a typed error, the stream serves on, memory is bounded."""

import asyncio
import math
import time

import grpc
import pytest

from gammaray.types import SamplingParams, VerificationMethod
from gammaray.v1 import target_service_pb2
from gammaray.v1 import types_pb2 as types
from services.scheduling import sessions
from services.scheduling.sessions import SessionTable
from services.streaming import streams
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.vllm_helpers import Session
from tests.support.workers.held_engine import HeldEngine, all_read
from tests.support.workers.scripted_workers import until
from tests.support.workers.workers_helpers import (
    ANSWER_TIMEOUT_S,
    GREEDY,
    Link,
    block_of,
    propose_block,
    running,
    spec_message,
    verify_block,
)

pytestmark = pytest.mark.integration

PROMPT = random_tokens(12, seed=3)
INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED = 3, 4, 8
TOO_MUCH = grpc.StatusCode.RESOURCE_EXHAUSTED


def sampling(**fields):
    spec = spec_message(GREEDY)
    for name, value in fields.items():
        setattr(spec.sampling, name, value)
    return spec


def rejecting(proposal):
    spec = spec_message(SamplingParams(temperature=1.0, seed=1), VerificationMethod.REJECTION)
    return verify_block(PROMPT, proposal, spec=spec)


def without_seed():
    spec = spec_message(GREEDY)
    spec.sampling.ClearField("seed")
    return spec


WRONG_SUM = types.SparseDistribution(token_ids=[1, 2], weights=[1, 2], weight_bits=2)
BAD_VERIFIES = {
    "proposed id out of vocabulary": verify_block(PROMPT, [97]),
    "context id out of vocabulary": verify_block([*PROMPT, 2**32 - 1]),
    "tree with rejection": rejecting(types.Proposal(token_ids=[1, 2], parents=[-1, -1])),
    "weights of a wrong sum": rejecting(types.Proposal(token_ids=[1], draft_distributions=[WRONG_SUM])),
    "proposal of 10^6 tokens": verify_block(PROMPT, [1] * 10**6),
    "proposal of 257 tokens": verify_block(PROMPT, [1] * 257),
    "proposal beyond the context": verify_block(random_tokens(254, seed=1), [1, 2, 3]),
    "base beyond the context": verify_block(random_tokens(300, seed=1)),
    "context that ends early": verify_block(PROMPT, base_position=len(PROMPT) + 1),
    "context that ends late": verify_block(PROMPT, base_position=len(PROMPT) - 1),
    "context past 2^32": verify_block(PROMPT, context=types.TokenSpan(start=2**32 - 1, token_ids=PROMPT)),
    "nothing committed": verify_block([]),
    "no session": verify_block(PROMPT, session_id=""),
    "session of 10^4 characters": verify_block(PROMPT, session_id="x" * 10**4),
    "21 log-probabilities": verify_block(PROMPT, num_top_logprobs=21),
    "21 log-probabilities of the prompt": verify_block(PROMPT, num_prompt_logprobs=21),
    "unknown method": verify_block(PROMPT, spec=types.SessionSpec(verification=17)),
    "no seed": verify_block(PROMPT, spec=without_seed()),
    "temperature NaN": verify_block(PROMPT, spec=sampling(temperature=math.nan)),
    "prompt longer than the context": verify_block(PROMPT, spec=spec_message(prompt_length=13)),
    "no prompt": verify_block(PROMPT, spec=spec_message(prompt_length=0)),
    "end of sequence out of vocabulary": verify_block(PROMPT, spec=spec_message(eos_token_ids=[97])),
    "salt of 10^4 characters": verify_block(PROMPT, spec=spec_message(cache_salt="x" * 10**4)),
    "masks of the whole vocabulary": verify_block(
        PROMPT, spec=spec_message(SamplingParams(seed=1, banned_token_ids=tuple(range(97))))
    ),
}
BAD_PROPOSES = {
    "gamma 10^6": propose_block(PROMPT, 10**6),
    "gamma 0": propose_block(PROMPT, 0),
    "max_nodes 10^6": propose_block(PROMPT, 2, max_nodes=10**6),
    "context id out of vocabulary": propose_block([*PROMPT, 97], 2),
    "context that ends early": propose_block(PROMPT, 2, base_position=len(PROMPT) + 1),
    "nothing committed": propose_block([], 2),
    "no seed": propose_block(PROMPT, 2, spec=without_seed()),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("hostile"), max_position_embeddings=256)


@pytest.fixture
async def target(model):
    async with running("target", model) as (link, _):
        yield link


async def test_bad_verify_blocks_are_rejected_and_good_ones_in_their_frame_and_later_are_not(target):
    good = [verify_block(PROMPT, session_id=f"g{index}") for index in range(4)]
    alone = await target.ask(verify_block(PROMPT, session_id="alone"))
    answers = await target.ask(*good[:2], *BAD_VERIFIES.values(), *good[2:])
    assert [a.verdict for a in (*answers[:2], *answers[-2:])] == [alone.verdict] * 4
    for name, answer in zip(BAD_VERIFIES, answers[2:-2], strict=True):
        assert answer.WhichOneof("outcome") == "error", name
        assert answer.error.code == INVALID_ARGUMENT, (name, answer.error)
        assert "allowed" in answer.error.message, (name, answer.error)
        assert len(answer.error.message) < 400, name
    assert (await target.ask(verify_block(PROMPT, session_id="after"))).verdict == alone.verdict
    assert (await target.info()).num_queued == 0


async def test_bad_propose_blocks_are_rejected_and_the_stream_continues(model):
    async with running("draft", model) as (link, _):
        for name, block in BAD_PROPOSES.items():
            answer = await link.ask(block)
            assert answer.error.code == INVALID_ARGUMENT, (name, answer)
            assert len((await link.ask(propose_block(PROMPT, 3))).proposal.token_ids) == 3


async def test_bad_block_does_not_change_the_session(target):
    first = await target.ask(verify_block(PROMPT, session_id="s"))
    for bad in BAD_VERIFIES.values():
        block = target_service_pb2.VerifyBlock.FromString(bad.SerializeToString())
        block.ClearField("spec")
        await target.ask(block)
    tokens = [*PROMPT, first.verdict.next_token_id]
    follow = verify_block(tokens, context=types.TokenSpan(start=len(PROMPT), token_ids=tokens[len(PROMPT) :]))
    follow.ClearField("spec")
    fresh = await target.ask(verify_block(tokens, session_id="fresh"))
    answer = await target.ask(follow)
    assert answer.verdict == fresh.verdict


async def test_proposal_wider_than_a_forward_is_refused(model):
    async with running("target", model, max_batch_tokens=16) as (link, _):
        answer = await link.ask(verify_block(PROMPT, [1] * 16))
        assert answer.error.code == INVALID_ARGUMENT
        assert "max_batch_tokens" in answer.error.message
        assert (await link.ask(verify_block(PROMPT, [1] * 15))).WhichOneof("outcome") == "verdict"


async def test_block_past_its_timeout_fails_with_deadline_exceeded(model):
    async with running("target", model, max_batch_tokens=16) as (link, _):
        blocks = [
            verify_block(random_tokens(250, seed=index), session_id=f"s{index}", timeout_ms=1)
            for index in range(8)
        ]
        began = time.monotonic()
        answers = await link.ask(*blocks)
        assert {answer.error.code for answer in answers} == {DEADLINE_EXCEEDED}
        assert time.monotonic() - began < ANSWER_TIMEOUT_S / 2
        assert (await link.info()).num_queued == 0


async def test_flood_of_one_stream_is_bounded(target, monkeypatch):
    monkeypatch.setattr(streams, "MAX_IN_FLIGHT", 8)
    answers = await target.ask(*(verify_block(PROMPT, session_id=f"s{index}") for index in range(20)))
    codes = [answer.error.code for answer in answers]
    assert codes == [0] * 8 + [RESOURCE_EXHAUSTED] * 12
    assert (await target.ask(verify_block(PROMPT))).WhichOneof("outcome") == "verdict"


async def test_frame_beyond_the_message_limit_ends_the_stream_and_not_the_worker(model):
    async with running("target", model) as (link, worker):
        await link.send([verify_block([1], session_id="x" * (17 << 20))])
        assert await asyncio.wait_for(link.call.code(), ANSWER_TIMEOUT_S) is TOO_MUCH
        worker.check()
        assert (await link.info()).num_queued == 0


async def test_session_table_is_bounded(model, monkeypatch):
    monkeypatch.setattr("services.scheduling.scheduler.MAX_SESSIONS", 4)
    async with running("target", model) as (link, _):
        for index in range(12):
            await link.ask(verify_block(PROMPT, session_id=f"s{index}"))
        assert (await link.info()).num_sessions == 4
        follow = types.TokenSpan(start=len(PROMPT), token_ids=[1])
        kept = verify_block([*PROMPT, 1], session_id="s11", context=follow, spec=None)
        lost = verify_block([*PROMPT, 1], session_id="s0", context=follow, spec=None)
        assert (await link.ask(kept)).WhichOneof("outcome") == "verdict"
        assert (await link.ask(lost)).need.position == 0


async def test_token_ids_of_all_streams_are_bounded(model, monkeypatch):
    monkeypatch.setattr(streams, "MAX_IDS_IN_FLIGHT", 500)
    async with running("target", model) as (link, worker):
        other = Link(worker.address, "target")
        blocks = [verify_block(random_tokens(200, seed=i), session_id=f"s{i}") for i in range(6)]
        answers = [*await link.ask(*blocks[:3]), *await other.ask(*blocks[3:])]
        refused = [answer for answer in answers if answer.WhichOneof("outcome") == "error"]
        assert refused
        assert {answer.error.code for answer in refused} == {RESOURCE_EXHAUSTED}
        assert len(refused) < len(answers)
        assert worker.streams.num_ids == 0
        assert (await link.ask(verify_block(random_tokens(250, seed=9)))).WhichOneof("outcome") == "verdict"
        await other.close()


async def test_broken_stream_releases_its_token_ids(model):
    async with running("target", model, max_batch_tokens=16) as (link, worker):
        async with HeldEngine(worker):
            await link.send([verify_block(random_tokens(250, seed=i), session_id=f"s{i}") for i in range(8)])
            await all_read(link)
            assert worker.streams.num_ids == 8 * 250
            await link.close()
        await until(lambda: worker.streams.num_ids == 0)


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_frame_of_too_many_blocks_ends_its_stream_with_a_status(model, role, monkeypatch):
    monkeypatch.setattr(streams, "MAX_FRAME_BLOCKS", 10)
    block = block_of(role, PROMPT)
    async with running(role, model) as (link, worker):
        await link.send([type(block).FromString(block.SerializeToString()) for _ in range(11)])
        assert await asyncio.wait_for(link.call.code(), ANSWER_TIMEOUT_S) is TOO_MUCH
        assert "11 blocks" in await link.call.details()
        fresh = Link(worker.address, role)
        assert (await fresh.ask(block)).WhichOneof("outcome") in ("verdict", "proposal")
        await fresh.send(releases=[f"s{i}" for i in range(11)])
        assert await asyncio.wait_for(fresh.call.code(), ANSWER_TIMEOUT_S) is TOO_MUCH
        await fresh.close()


async def test_drafter_refuses_a_context_that_no_model_has(model, monkeypatch):
    monkeypatch.setattr("services.scheduling.tasks.MAX_TOKEN_IDS", 1000)
    async with running("draft", model) as (link, _):
        answer = await link.ask(propose_block([1] * 1001, 2))
        assert answer.error.code == INVALID_ARGUMENT
        assert "context" in answer.error.message
        assert not (await link.ask(propose_block([1] * 999, 2))).proposal.token_ids


def test_masks_of_sessions_count_towards_the_bound_of_the_table(monkeypatch):
    monkeypatch.setattr(sessions, "MAX_TOKENS", 300)
    dropped = []
    table = SessionTable(
        100, 97, "cpu", lambda session_id: False, lambda session: dropped.append(session.session_id)
    )
    params = SamplingParams(temperature=0.0, seed=1, banned_token_ids=tuple(range(90)))
    for index in range(10):
        table.admit(Session([5, 6, 7, 8], params, name=f"s{index}").block())
    assert len(table) == 3
    assert dropped == [f"s{index}" for index in range(7)]
