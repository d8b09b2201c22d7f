"""Proposals of vLLM: those of the CPU engine, and the life of their requests."""

import time
from collections.abc import Iterator

import pytest

from gammaray.blocks import Shape
from gammaray.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
)
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.engine.core.errors import EngineLostError
from services.engine.loader import load_engine
from services.own.draft_scheduler import DraftScheduler
from services.scheduling.grammars import Grammars
from services.scheduling.tasks import Release
from services.vllm.engine import CPU_DRAFT_BLOCK
from tests.support.engine_helpers import random_tokens
from tests.support.processing_helpers import GRAMMAR, follows_grammar
from tests.support.vllm_helpers import (
    Session,
    answer,
    answers,
    ask,
    assert_alike,
    draft,
    draft_task,
)
from tests.vllm.conftest import LIMITS, MAX_POSITIONS

DRAWN = SamplingParams(seed=1)


@pytest.fixture(scope="module")
def engine(llama):
    from services.vllm.engine import EngineOptions, VllmEngine

    options = EngineOptions(
        model=str(llama),
        cache_budget_bytes=32 << 20,
        max_batch_tokens=LIMITS.max_batch_tokens,
        prefill_chunk=LIMITS.prefill_chunk,
        is_draft=True,
    )
    engine = VllmEngine(options)
    yield engine
    engine.shutdown()


def scheduler_of(engine, llama, ahead_rows: int) -> Iterator:
    """Yield a scheduler without sessions, which has none in the end."""
    from services.vllm.draft_scheduler import VllmDraftScheduler

    grammars = Grammars(str(llama), engine.vocab_size)
    scheduler = VllmDraftScheduler(engine, ahead_rows=ahead_rows, grammars=grammars)
    yield scheduler
    scheduler.step()
    scheduler.release([Release(name, 0, True) for name in list(scheduler.queue.sessions)])
    scheduler.step()
    assert not scheduler.has_work


@pytest.fixture
def ready(engine):
    """The model, which has no requests in the end."""
    yield engine
    assert engine.stats().num_sessions == 0


@pytest.fixture
def drafts(ready, llama):
    """vLLM's scheduler without draft-ahead."""
    yield from scheduler_of(ready, llama, 0)


@pytest.fixture
def ahead(ready, llama):
    """The same with draft-ahead of two sessions at a time."""
    yield from scheduler_of(ready, llama, 2)


@pytest.fixture(scope="module")
def cpu_drafts(llama):
    engine = load_engine(str(llama))
    grammars = Grammars(str(llama), engine.vocab_size)
    return DraftScheduler(engine, LIMITS, ahead_rows=0, grammars=grammars)


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
@pytest.mark.parametrize(
    "params", [GREEDY, DRAWN, FILTERED, PENALISED], ids=["greedy", "drawn", "filtered", "penalised"]
)
def test_proposals_of_a_batch_are_those_of_the_cpu_engine(drafts, cpu_drafts, method, params):
    ours, theirs = sessions_with(params, method), sessions_with(params, method)
    for session in ours + theirs:
        session.eos_token_ids = (11,)
    for one, other in zip(draft(drafts, ours, 5), draft(cpu_drafts, theirs, 5), strict=True):
        assert_alike(one, other)


def test_sessions_keep_their_noise_until_they_end(drafts):
    sampler = drafts.engine.core.model_executor.driver_worker.worker.sampler
    sessions = [Session(random_tokens(9, seed=seed), SamplingParams(seed=seed)) for seed in range(6)]
    for _ in range(2):
        draft(drafts, sessions, 3)
        assert sampler.num_sessions == len(sessions)
    drafts.release([Release(session.name, 0, False) for session in sessions])
    draft(drafts, [Session(random_tokens(9, seed=7), SamplingParams(seed=7))], 1)
    assert sampler.num_sessions == 1


@pytest.mark.parametrize("method", [VerificationMethod.COUPLED, VerificationMethod.BLOCK])
def test_a_grammar_masks_each_drafted_token(drafts, cpu_drafts, method):
    params, eos = SamplingParams(seed=6, grammar=GRAMMAR), (0, 3)

    def propose(scheduler) -> list[Proposal]:
        return draft(scheduler, sessions_with(params, method, 4, eos_token_ids=eos), 6)

    for one, other in zip(propose(drafts), propose(cpu_drafts), strict=True):
        assert_alike(one, other)
        for index, token_id in enumerate(one.token_ids):
            assert follows_grammar(one.token_ids[:index], token_id, eos)


def test_an_end_of_sequence_ends_a_chain_but_not_its_duration_where_distributions_are_shipped(drafts):
    for method, num_forwards in ((VerificationMethod.COUPLED, 4), (VerificationMethod.REJECTION, 6)):
        (session,) = sessions_with(DRAWN, method, count=1)
        (whole,) = draft(drafts, [session], 6)
        end = whole.token_ids[3]
        assert end not in whole.token_ids[:3]
        ending = Session(session.prompt, DRAWN, method, eos_token_ids=(end,))
        (reply,) = answers(drafts, [draft_task(ending, 6)])
        assert reply.outcome.token_ids == whole.token_ids[:4]
        assert len(reply.outcome.draft_distributions or ()) == (4 if num_forwards == 6 else 0)
        assert reply.timing.num_forwards == num_forwards


def test_a_newer_block_cancels_the_running_one_at_once(drafts):
    (session,) = sessions_with(DRAWN, count=1)
    old = draft_task(session, 8)
    drafts.submit([old])
    assert drafts.step() == []  # its first token
    session.tokens.append(9)
    new = draft_task(session, 4)
    drafts.submit([new])
    ((task, reply), *_) = drafts.step()
    assert task is old
    assert isinstance(reply.outcome, CancelledError)
    assert drafts.queue.stats().num_sessions == 1
    (fresh,) = sessions_with(DRAWN, count=1)
    fresh.tokens.append(9)
    assert answer(drafts, new).outcome == draft(drafts, [fresh], 4)[0]


def test_a_block_of_an_older_epoch_does_not_cancel(drafts):
    (session,) = sessions_with(DRAWN, count=1)
    session.epoch = 2
    running, old = draft_task(session, 4), draft_task(session, 4, epoch=1)
    drafts.submit([running])
    drafts.step()
    drafts.submit([old])
    assert isinstance(answer(drafts, running).outcome, Proposal)
    assert isinstance(answer(drafts, old).outcome, FailedPreconditionError)


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
            assert drafts.queue.stats().num_sessions == 1
    kinds = [type(replies[task.request_id]) for task in tasks]
    assert kinds == [DeadlineExceededError, CancelledError, CancelledError, Proposal]
    assert drafts.queue.stats().num_sessions == 0


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


@pytest.mark.parametrize("stage", ["execute_model", "sample_tokens"])
def test_a_failed_step_fails_its_blocks_and_the_next_ones_are_served(drafts, monkeypatch, stage):
    from services.vllm.worker import DraftingWorker

    sessions = sessions_with(DRAWN, count=3)
    expected = draft(drafts, sessions, 4)

    def fail(*_):
        raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(DraftingWorker, stage, fail)
        outcomes = draft(drafts, sessions, 4)
    assert [type(outcome) for outcome in outcomes] == [InternalError] * 3
    assert drafts.queue.stats().num_sessions == 0
    assert draft(drafts, sessions, 4) == expected


def filling(engine, extra: int) -> list[Session]:
    """Return sessions whose prompts fill the cache of a model, and which then need one more block each."""
    per_session = min(range(20, 30), key=lambda count: engine.num_free_blocks % count)
    return [
        Session(random_tokens(per_session * CPU_DRAFT_BLOCK - 2, seed=seed), DRAWN)
        for seed in range(engine.num_free_blocks // per_session + extra)
    ]


def test_an_engine_that_is_lost_is_not_recovered_and_its_blocks_are_answered(drafts, monkeypatch):
    def fail():
        raise EngineLostError("vLLM does not release its KV cache")

    drafts.submit([draft_task(sessions_with(DRAWN)[0], 4)])
    with monkeypatch.context() as patch:
        patch.setattr(drafts.engine, "recover", fail)
        drafts.fail_all(EngineLostError("a process of vLLM has ended"))
    ((_, reply),) = drafts.step()
    assert isinstance(reply.outcome, EngineLostError)


def test_sessions_that_exceed_the_cache_together_are_all_served(drafts, cpu_drafts, monkeypatch):
    sessions, step, preempted = filling(drafts.engine, 0), drafts.engine.step, set()

    def noted_step(begin_masks):
        result = step(begin_masks)
        preempted.update(result.preempted)
        return result

    for session in sessions:
        draft(drafts, [session], 1)  # from here on the prefix cache has most of them
    monkeypatch.setattr(drafts.engine, "step", noted_step)
    for one, session in zip(draft(drafts, sessions, 12), sessions, strict=True):
        assert_alike(one, draft(cpu_drafts, [session], 12)[0])
    assert preempted


def idle(scheduler) -> int:
    """Draft ahead until that is done; return the number of steps."""
    for count in range(100):
        if not scheduler.has_work:
            return count
        assert scheduler.step() == []
    raise AssertionError("draft-ahead does not end")


@pytest.mark.parametrize(("temperature", "few"), [(0, 0), (1, 0), (1, 1)])
def test_a_proposal_that_was_drafted_ahead_is_answered_at_once(ahead, drafts, reference, temperature, few):
    params = SamplingParams(temperature=temperature, seed=2)
    (session,), (plain,) = sessions_with(params, count=1), sessions_with(params, count=1)
    for cycle in range(4):
        ahead.submit([task := draft_task(session, 3, shape=Shape(3, 0, few))])
        ((answered, reply),) = ahead.step() if cycle else [(task, answer(ahead, task))]
        assert answered is task
        assert reply.timing.num_forwards == (0 if cycle else few or 3)
        assert reply.outcome.token_ids == draft(drafts, [plain], 3 if cycle else few or 3)[0].token_ids
        idle(ahead)
        for one in (session, plain):
            ask(reference, one, reply.outcome)
        assert session.tokens == plain.tokens
    assert (ahead.queue.load().lookups, ahead.queue.load().hits) == (3, 3)


def test_draft_ahead_gives_its_memory_to_blocks(ahead):
    for session in filling(ahead.engine, 2):
        (proposal,) = draft(ahead, [session], 6)
        assert len(proposal) == 6
        idle(ahead)
    assert ahead.queue.stats().num_sessions > 5
    assert ahead.queue.stats().num_evictions > 0
