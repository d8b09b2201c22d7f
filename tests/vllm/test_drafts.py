"""Proposals of vLLM: those of the CPU engine, and the life of their requests."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gammaray.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.draft.scheduler import DraftScheduler
from services.engine.core.errors import EngineLostError
from services.engine.loader import load_engine
from services.scheduling.grammars import Grammars
from services.scheduling.tasks import NeedTokens, Release
from tests.support.engine_helpers import random_tokens
from tests.support.vllm_draft_helpers import assert_alike, draft, draft_task
from tests.support.vllm_helpers import NOTHING, Session, answers, ask, generate
from tests.vllm.conftest import LIMITS, MAX_POSITIONS, VOCAB_SIZE

SHIPPED = {"draft_top_k": 8, "weight_bits": 10}
DRAWN = SamplingParams(seed=1)


@pytest.fixture(scope="module")
def started(llama) -> Iterator:
    """vLLM's scheduler of drafts, without draft-ahead."""
    from services.vllm.draft_scheduler import VllmDraftScheduler
    from services.vllm.engine import EngineOptions, VllmEngine

    options = EngineOptions(
        model=str(llama),
        cache_budget_bytes=32 << 20,
        max_batch_tokens=LIMITS.max_batch_tokens,
        prefill_chunk=LIMITS.prefill_chunk,
        is_draft=True,
    )
    engine = VllmEngine(options)
    grammars = Grammars(str(llama), engine.vocab_size)
    scheduler = VllmDraftScheduler(engine, LIMITS, ahead_rows=0, grammars=grammars, **SHIPPED)
    yield scheduler
    scheduler.close()


@pytest.fixture
def drafts(started) -> Iterator:
    """The same, without sessions before and after a test."""
    yield started
    started.step()
    started.release([Release(name, 0, True) for name in list(started.sessions)])
    started.step()
    assert started.is_idle
    assert started.stats().num_sessions == 0


@pytest.fixture(scope="module")
def cpu_drafts(llama) -> DraftScheduler:
    engine = load_engine(str(llama))
    grammars = Grammars(str(llama), engine.vocab_size)
    return DraftScheduler(engine, LIMITS, ahead_rows=0, grammars=grammars, **SHIPPED)


def sessions_with(
    params: SamplingParams, method: VerificationMethod = VerificationMethod.COUPLED, count: int = 8, **fields
) -> list[Session]:
    return [
        Session(random_tokens(5 + 9 * index, seed=index), params, method, **fields) for index in range(count)
    ]


FILTERED = SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=3)
PENALISED = SamplingParams(
    seed=4,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    logit_bias={5: 2.0},
    banned_token_ids=(7, 8),
    min_tokens=3,
)
GREEDY = SamplingParams(temperature=0, seed=0)


@pytest.mark.parametrize("method", VerificationMethod)
@pytest.mark.parametrize("params", [GREEDY, DRAWN, FILTERED, PENALISED], ids=repr)
def test_proposals_of_a_batch_are_those_of_the_cpu_engine(drafts, cpu_drafts, method, params):
    ours, theirs = sessions_with(params, method), sessions_with(params, method)
    for session in ours + theirs:
        session.eos_token_ids = (11,)
    for one, other in zip(draft(drafts, ours, 5), draft(cpu_drafts, theirs, 5), strict=True):
        assert_alike(one, other)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_draft_equal_to_the_target_is_accepted_whole(drafts, reference, temperature):
    params = SamplingParams(temperature=temperature, seed=2)
    ours, plain = sessions_with(params, count=4), sessions_with(params, count=4)
    for _ in range(5):
        for session, proposal in zip(ours, draft(drafts, ours, 4), strict=True):
            verdict = ask(reference, session, proposal)
            assert len(verdict.accepted_path) == len(proposal) == 4
    expected = generate(reference, plain, 25, lambda session: NOTHING)
    assert [session.output for session in ours] == expected


@pytest.mark.parametrize("method", [VerificationMethod.COUPLED, VerificationMethod.BLOCK])
def test_a_grammar_masks_each_drafted_token(drafts, cpu_drafts, method):
    params = SamplingParams(seed=6, grammar='start: "[" ("0" | "1")+ "]"')
    ours, theirs = sessions_with(params, method, 3), sessions_with(params, method, 3)
    for scheduler, sessions in ((drafts, ours), (cpu_drafts, theirs)):
        for session in sessions:
            session.eos_token_ids = (0,)
        state = scheduler.grammars.compile(params.grammar)
        tasks = [draft_task(session, 6, grammar=state.copy()) for session in sessions]
        session_outcomes = [reply.outcome for reply in answers(scheduler, tasks)]
        if scheduler is drafts:
            found = session_outcomes
    for one, other in zip(found, session_outcomes, strict=True):
        assert_alike(one, other)


def test_an_end_of_sequence_ends_a_chain_but_not_its_duration_where_distributions_are_shipped(drafts):
    for method, num_forwards in ((VerificationMethod.COUPLED, 3), (VerificationMethod.REJECTION, 6)):
        (session,) = sessions_with(DRAWN, method, count=1)
        (whole,) = draft(drafts, [session], 6)
        end = whole.token_ids[2]
        assert end not in whole.token_ids[:2]
        ending = Session(session.prompt, DRAWN, method, eos_token_ids=(end,))
        (reply,) = answers(drafts, [draft_task(ending, 6)])
        assert reply.outcome.token_ids == whole.token_ids[:3]
        assert len(reply.outcome.draft_distributions or ()) == (3 if num_forwards == 6 else 0)
        assert reply.timing.num_forwards == num_forwards


def test_sessions_share_the_steps_of_a_batch(drafts):
    sessions = sessions_with(DRAWN)
    draft(drafts, sessions, 1)  # reads the prompts
    for session in sessions:
        session.tokens.append(3)
    replies = answers(drafts, [draft_task(session, 6) for session in sessions])
    assert {reply.timing.num_forwards for reply in replies} == {6}
    assert {reply.timing.batch_size for reply in replies} == {8}


def test_a_newer_block_cancels_the_running_one_at_once(drafts):
    (session,) = sessions_with(DRAWN, count=1)
    old = draft_task(session, 8)
    drafts.submit([old])
    assert drafts.step() == []
    session.tokens.append(9)
    new = draft_task(session, 4)
    drafts.submit([new])
    ((task, reply), *_) = drafts.step()
    assert task is old
    assert isinstance(reply.outcome, CancelledError)
    assert drafts.stats().num_sessions == 1
    (fresh,) = sessions_with(DRAWN, count=1)
    fresh.tokens.append(9)
    (reply,) = answers(drafts, [])[:1] or [reply for _, reply in _steps(drafts)]
    assert reply.request_id == new.request_id
    assert reply.outcome == draft(drafts, [fresh], 4)[0]


def _steps(scheduler):
    for _ in range(50):
        replies = scheduler.step()
        if replies:
            return replies
    raise AssertionError("no answer")


def test_blocks_that_wait_together_are_read_but_only_the_newest_is_drafted(drafts):
    (session,) = sessions_with(DRAWN, count=1)
    first = draft_task(session, 4)
    session.tokens += [9, 8]
    second = draft_task(session, 4, context_start=first.base_position, context=[9, 8], spec=None)
    replies = answers(drafts, [first, second])
    assert isinstance(replies[0].outcome, CancelledError)
    assert isinstance(replies[1].outcome, Proposal)


def test_a_block_of_an_older_epoch_does_not_cancel(drafts):
    (session,) = sessions_with(DRAWN, count=1)
    session.epoch = 2
    running, old = draft_task(session, 4), draft_task(session, 4, epoch=1)
    drafts.submit([running])
    drafts.step()
    replies = answers(drafts, [old])
    if len(replies) == 1:
        replies += [reply for _, reply in _steps(drafts)] if drafts.num_queued else []
    assert drafts.is_idle


def test_dead_blocks_leave_the_batch_and_vllm(drafts):
    late, gone, ended, alive = sessions_with(DRAWN, count=4)
    tasks = [draft_task(session, 6) for session in (late, gone, ended, alive)]
    drafts.submit(tasks)
    assert drafts.step() == []
    tasks[0].deadline = time.monotonic() - 1
    tasks[1].cancelled = True
    drafts.release([Release(ended.name)])
    replies = {}
    while len(replies) < 4:
        replies |= {reply.request_id: reply.outcome for _, reply in drafts.step()}
        if len(replies) == 3:
            assert drafts.stats().num_sessions == 1
    kinds = [type(replies[task.request_id]) for task in tasks]
    assert kinds == [DeadlineExceededError, CancelledError, CancelledError, Proposal]
    assert drafts.stats().num_sessions == 0


def test_a_worker_that_lacks_tokens_asks_for_them(drafts):
    (session,) = sessions_with(DRAWN, count=1)
    (reply,) = answers(drafts, [draft_task(session, 4, context_start=3, context=session.tokens[3:])])
    assert reply.outcome == NeedTokens(0)


def test_tenants_share_prompts_among_their_sessions_only(drafts):
    prompt = random_tokens(100, seed=9)

    def cached(salt: str | None) -> int:
        session = Session(prompt, DRAWN, salt=salt)
        (reply,) = answers(drafts, [draft_task(session, 2)])
        return reply.timing.cached_tokens

    assert [cached("a"), cached("a"), cached("b"), cached(None), cached(None)] == [0, 96, 0, 0, 0]


def test_a_forgotten_session_leaves_nothing_in_the_prefix_cache(drafts):
    prompt = random_tokens(100, seed=10)
    sessions = [Session(prompt, DRAWN, salt="tenant") for _ in range(4)]
    draft(drafts, sessions[:2], 2)  # computed twice, at the same time
    drafts.release([Release(sessions[0].name)])
    (reply,) = answers(drafts, [draft_task(sessions[2], 2)])
    assert reply.timing.cached_tokens == 96
    drafts.release([Release(sessions[1].name, 0, forgets=True)])
    (reply,) = answers(drafts, [draft_task(sessions[3], 2)])
    assert reply.timing.cached_tokens == 0


def test_a_session_reads_its_own_text_once(drafts):
    (session,) = sessions_with(DRAWN, count=1)
    session.tokens += random_tokens(95, seed=3)
    draft(drafts, [session], 2)
    session.tokens.append(4)
    (reply,) = answers(drafts, [draft_task(session, 1)])
    assert reply.timing.cached_tokens == 96
    assert reply.timing.batch_tokens == len(session.tokens) - 96


def test_proposals_end_with_the_context(drafts):
    limit = drafts.engine.max_context
    assert limit == MAX_POSITIONS - 1
    lengths = []
    for length in (limit - 3, limit - 1, limit, MAX_POSITIONS, MAX_POSITIONS + 5):
        (proposal,) = draft(drafts, [Session(random_tokens(length, seed=1), DRAWN)], 8)
        lengths.append(len(proposal))
    assert lengths == [3, 1, 0, 0, 0]


def test_impossible_masks_are_an_error_of_their_session_alone(drafts):
    params = SamplingParams(seed=1, allowed_token_ids=(5,), banned_token_ids=(5,))
    broken, fine = Session([1, 2, 3], params), Session([1, 2, 3], DRAWN)
    outcomes = draft(drafts, [broken, fine], 3)
    assert isinstance(outcomes[0], InvalidArgumentError)
    assert len(outcomes[1]) == 3


def test_a_tree_is_answered_with_a_chain(drafts):
    (session,) = sessions_with(DRAWN, count=1)
    (chain,) = draft(drafts, [session], 4)
    (reply,) = answers(drafts, [draft_task(session, 4, max_nodes=12)])
    assert reply.outcome == chain


def test_a_failed_step_fails_its_blocks_and_the_next_ones_are_served(drafts, monkeypatch):
    sessions = sessions_with(DRAWN, count=3)
    expected = draft(drafts, sessions, 4)

    def fail(*_):
        raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(drafts.engine._core.model_executor, "execute_model", fail)
        outcomes = draft(drafts, sessions, 4)
    assert [type(outcome) for outcome in outcomes] == [InternalError] * 3
    assert drafts.stats().num_sessions == 0
    assert draft(drafts, sessions, 4) == expected


def test_a_lost_engine_ends_the_thread(drafts, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(drafts.engine, "_lost", "a process of vLLM has ended")
        drafts.submit([draft_task(sessions_with(DRAWN, count=1)[0], 4)])
        with pytest.raises(EngineLostError):
            drafts.step()
    drafts.fail_all(InternalError("lost"))


def test_more_sessions_than_the_cache_holds_are_served_one_after_another(drafts, monkeypatch):
    num_blocks = drafts.engine.num_free_blocks
    long = [Session(random_tokens(900, seed=seed), DRAWN) for seed in range(num_blocks // 29 + 3)]
    outcomes = draft(drafts, long, 3)
    assert {type(outcome) for outcome in outcomes} <= {Proposal, ResourceExhaustedError}
    assert all(len(outcome) == 3 for outcome in outcomes)
    assert VOCAB_SIZE > max(token for outcome in outcomes for token in outcome.token_ids)
