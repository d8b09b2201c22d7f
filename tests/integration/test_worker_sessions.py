"""Drafters and verifiers on scripted workers: feeding, refusals, failover, spreading of sessions."""

import math

import pytest

from gammaray.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from gammaray.types import Proposal
from gammaray.v1 import types_pb2 as pb
from orchestrator.cycle.run import run_cycle
from orchestrator.workers.drafter import Readiness
from tests.support.workers.fleet_helpers import clients, emitted, fleet_of
from tests.support.workers.scripted_workers import (
    PROMPT,
    VOCAB,
    Steady,
    continuation,
    finish,
    make_session,
    scripted,
    until,
)

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
async def test_remote_session_is_lossless_and_sends_only_missing_tokens(gamma):
    async with scripted("target", "draft") as (target, draft), fleet_of(target, draft) as fleet:
        session = make_session(max_tokens=40)
        cycles = await finish(session, *clients(fleet, session), gamma)
        assert emitted(session) == continuation(PROMPT, 40)
        for worker in (target, draft):
            assert worker.num_needs == 0
            assert sum(block.HasField("spec") for block in worker.blocks) == (worker is target or gamma > 0)
        sent = sum(len(block.context.token_ids) for block in target.blocks)
        accepted = sum(c.num_accepted for c in cycles)
        assert sent <= len(PROMPT) + 40 - accepted + gamma
        assert (len(draft.blocks) > 0) is (gamma > 0)
        assert all(block.gamma <= gamma for block in draft.blocks)


async def test_remote_evicted_session_is_fed_again():
    async with scripted("target", "draft") as (target, draft), fleet_of(target, draft) as fleet:
        work = {worker: worker.work for worker in (target, draft)}

        def forgetful(worker):
            def answer(block):
                if len(worker.blocks) in (4, 7):
                    worker.forget()
                elif len(worker.blocks) == 5:  # a part of the cache is gone
                    worker.held[block.session_id] = worker.held.get(block.session_id, [])[:2]
                return work[worker](block)

            return answer

        for worker in (target, draft):
            worker.on_block = forgetful(worker)
        session = make_session(max_tokens=40)
        cycles = await finish(session, *clients(fleet, session), 3)
        assert emitted(session) == continuation(PROMPT, 40)
        assert target.num_needs >= 2
        assert draft.num_needs >= 2
        assert not any(c.draft_failed for c in cycles)


async def test_remote_worker_that_always_requests_tokens_is_abandoned():
    async with scripted("target", "draft") as (target, draft), fleet_of(target, draft) as fleet:
        greedy = lambda worker: lambda block: worker.result(block, need=pb.NeedTokens(position=0))  # noqa: E731
        session = make_session(max_tokens=8)
        drafter, verifier = clients(fleet, session)
        draft.on_block = greedy(draft)
        cycles = await finish(session, drafter, verifier, 3)
        assert emitted(session) == continuation(PROMPT, 8)
        assert cycles[0].draft_failed
        target.on_block = greedy(target)
        session = make_session("t")
        with pytest.raises(InternalError, match="lacks tokens after"):
            await finish(session, *clients(fleet, session), 0)
        target.on_block = lambda block: target.result(block, need=pb.NeedTokens(position=10**6))
        session = make_session("u")
        with pytest.raises(InternalError, match="ahead of the session"):
            await finish(session, *clients(fleet, session), 0)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (3, InvalidArgumentError),
        (4, DeadlineExceededError),
        (8, ResourceExhaustedError),
        (9, FailedPreconditionError),
        (13, InternalError),
        (0, InternalError),
        (2**32 - 1, InternalError),
    ],
)
async def test_remote_block_error_of_the_target_has_its_class(code, error):
    async with scripted("target") as target, fleet_of(target) as fleet:
        target.on_block = lambda b: target.result(b, error=pb.BlockError(code=code, message="because"))
        session = make_session()
        with pytest.raises(error, match="because"):
            await finish(session, *clients(fleet, session), 0)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param({}, id="none"),
        pytest.param({"logprobs": [-1.0]}, id="too-few"),
        pytest.param({"num_top": 2**32 - 1}, id="columns-that-do-not-fit"),
        pytest.param({"logprobs": [math.nan]}, id="nan"),
        pytest.param({"num_top": 1, "top_token_ids": [VOCAB], "top_logprobs": [-1.0]}, id="top-token"),
        pytest.param({"num_top": 3, "top_token_ids": [1] * 3, "top_logprobs": [-1.0] * 3}, id="too-many"),
    ],
)
async def test_remote_impossible_prompt_logprobs_are_a_typed_error(sent):
    async with scripted("target") as target, fleet_of(target) as fleet:
        entries = len(PROMPT) - 1
        good = {"logprobs": [-1.0], "ranks": [1]}
        columns = {name: value * entries for name, value in {**good, **sent}.items() if name != "num_top"}
        if not sent:
            columns = {}
        if sent == {"logprobs": [-1.0]}:
            columns["logprobs"] = columns["logprobs"][1:]

        def answer(block):
            assert block.num_prompt_logprobs == 2
            result = target.work(block)
            result.verdict.prompt_logprobs.CopyFrom(
                pb.PromptLogprobs(**columns, num_top=sent.get("num_top", 0))
            )
            return result

        target.on_block = answer
        session = make_session()
        session.num_prompt_logprobs = 2
        with pytest.raises(InternalError):
            await finish(session, *clients(fleet, session), 0)
        assert emitted(session) == []


async def test_remote_prompt_logprobs_are_requested_until_a_token_is_emitted():
    async with scripted("target") as target, fleet_of(target) as fleet:
        asked = []

        def answer(block):
            asked.append(block.HasField("num_prompt_logprobs"))
            result = target.work(block)
            if asked[-1]:
                columns = {"logprobs": [-1.0] * (len(PROMPT) - 1), "ranks": [1] * (len(PROMPT) - 1)}
                result.verdict.prompt_logprobs.CopyFrom(pb.PromptLogprobs(**columns))
            return result

        target.on_block = answer
        session = make_session(max_tokens=4)
        session.num_prompt_logprobs = 0
        await finish(session, *clients(fleet, session), 0)
        assert session.prompt_logprobs.token_ids == tuple(PROMPT)
        assert asked == [True, False, False, False]


async def test_remote_drafter_and_target_prefill_a_long_prompt_concurrently():
    async with scripted("target", "draft") as (target, draft), fleet_of(target, draft) as fleet:
        prompt = tuple(i % VOCAB for i in range(500))
        draft.runs.clear()
        session = make_session(max_tokens=60, prompt=prompt)
        drafter, verifier = clients(fleet, session)
        cycles = [await run_cycle(session, drafter, verifier, Steady(3)) for _ in range(4)]
        assert [(c.gamma, c.num_drafted, c.draft_failed) for c in cycles] == [(3, 0, False)] * 4
        await until(lambda: draft.blocks)
        (waiting,) = draft.blocks
        assert (waiting.base_position, len(waiting.context.token_ids)) == (500, 500)
        draft.runs.set()
        await until(lambda: drafter.prepare(session) is Readiness.READY)
        cycles = await finish(session, drafter, verifier, 3)
        assert session.token_ids[500:] == continuation(prompt, 60)
        assert cycles[-2].num_drafted > 0
        assert len(draft.blocks[1].context.token_ids) < 10, "what was read is not sent again"


async def test_remote_draft_context_ends_before_the_targets():
    async with scripted("target") as target, scripted("draft", max_context=20) as draft:
        async with fleet_of(target, draft) as fleet:
            session = make_session(max_tokens=30)
            cycles = await finish(session, *clients(fleet, session), 4)
            assert emitted(session) == continuation(PROMPT, 30)
            assert not any(c.draft_failed for c in cycles)
            assert all(b.base_position + b.gamma <= 20 for b in draft.blocks)


async def test_remote_sessions_stay_and_new_ones_go_to_the_least_loaded():
    async with scripted("target", "target", "target") as targets, fleet_of(*targets) as fleet:
        pairs = []
        for index in range(9):
            session = make_session(f"s{index}", max_tokens=50)
            _, verifier = clients(fleet, session)
            pairs.append((session, verifier))
            for _ in range(3):
                verdict = await verifier.verify(session, Proposal())
                session.commit([verdict.next_token_id])
        assert [len(t.held) for t in targets] == [3, 3, 3]
        assert [len(t.blocks) for t in targets] == [9, 9, 9]
        for session, verifier in pairs:
            verifier.release(session)
            verifier.release(session)
        await until(lambda: all(not t.held for t in targets))
        assert [len(t.released) for t in targets] == [3, 3, 3]
