"""The memory of a worker is bounded for any requests; each rejection has its status."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from gammaray.types import SamplingParams, VerificationMethod
from services.scheduling import sessions
from services.scheduling.sessions import SessionTable
from services.scheduling.tasks import SessionSpec, VerifyTask
from services.streaming import streams
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.workers.held_engine import HeldEngine, all_read
from tests.support.workers.scripted_workers import until
from tests.support.workers.workers_helpers import ANSWER_TIMEOUT_S, Link, propose_block, running, verify_block

pytestmark = pytest.mark.integration

PROMPT = [5, 6, 7, 8]
RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT.value[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("bounds"), max_position_embeddings=256)


async def test_token_ids_of_all_streams_are_bounded(model, monkeypatch):
    monkeypatch.setattr(streams, "MAX_IDS_IN_FLIGHT", 500)
    async with running("target", model) as (link, worker):
        other = Link(worker.address, "target")
        blocks = [verify_block(random_tokens(200, seed=i), session_id=f"s{i}") for i in range(6)]
        answers = [*await link.ask(*blocks[:3]), *await other.ask(*blocks[3:])]
        refused = [answer for answer in answers if answer.WhichOneof("outcome") == "error"]
        assert refused
        assert {answer.error.code for answer in refused} == {RESOURCE_EXHAUSTED.value[0]}
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
    block = verify_block(PROMPT) if role == "target" else propose_block(PROMPT, 2)
    async with running(role, model) as (link, worker):
        await link.send([type(block).FromString(block.SerializeToString()) for _ in range(11)])
        assert await asyncio.wait_for(link.call.code(), ANSWER_TIMEOUT_S) is RESOURCE_EXHAUSTED
        assert "11 blocks" in await link.call.details()
        fresh = Link(worker.address, role)
        assert (await fresh.ask(block)).WhichOneof("outcome") in ("verdict", "proposal")
        await fresh.send(releases=[f"s{i}" for i in range(11)])
        assert await asyncio.wait_for(fresh.call.code(), ANSWER_TIMEOUT_S) is RESOURCE_EXHAUSTED
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
        table.admit(
            VerifyTask(
                request_id=index,
                session_id=f"s{index}",
                epoch=1,
                base_position=4,
                context_start=0,
                context=PROMPT,
                spec=SessionSpec(params, VerificationMethod.COUPLED, 4, ()),
                deadline=0.0,
                deliver=lambda task, reply: None,
                proposal=None,
                num_top_logprobs=None,
            )
        )
    assert len(table) == 3
    assert dropped == [f"s{index}" for index in range(7)]
