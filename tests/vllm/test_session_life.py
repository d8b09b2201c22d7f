"""A session from its first block to its end: what vLLM's request of it has to follow."""

import random
import time

import pytest

from gammaray.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
)
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.scheduling.tasks import NeedTokens, Release
from tests.support.vllm_helpers import Session, ask, drafted, end, generate, prompt, references

SAMPLED = SamplingParams(seed=11)


def plain(reference, tokens, count, params=SAMPLED):
    """Return the CPU engine's tokens after some, without proposals."""
    return references(reference, [Session(tokens, params)], count)[0]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 300], ids=str)
@pytest.mark.parametrize("gamma", [0, 1, 8], ids="gamma{}".format)
def test_first_block_of_any_prompt_gives_the_cpu_engines_tokens(scheduler, reference, length, gamma):
    tokens = prompt(length)
    own = plain(reference, tokens, gamma + 1)
    session = Session(tokens, SAMPLED)
    verdict = ask(scheduler, session, own[:gamma])
    # vLLM verifies nothing with a prompt of one token: nothing of the prompt is left to be read before it.
    accepted = 0 if length == 1 else gamma
    assert session.output == own[: accepted + 1]
    assert (len(verdict.accepted_path), verdict.num_tested) == (accepted, accepted)


def test_proposals_of_every_length_are_verified_and_longer_ones_are_cut(scheduler, reference):
    tokens = prompt(20)
    own = plain(reference, tokens, 13)
    for wrong_at in (None, 0, 3, 7, 8, 11):
        for gamma in range(13):
            session = Session(tokens, SAMPLED)
            ask(scheduler, session)
            proposal = own[1 : 1 + gamma]
            if wrong_at is not None and wrong_at < gamma:
                proposal[wrong_at] = (proposal[wrong_at] + 1) % 97
            verdict = ask(scheduler, session, proposal)
            fits = min(gamma, scheduler.engine.max_proposal)
            accepted = fits if wrong_at is None else min(fits, wrong_at)
            assert len(verdict.accepted_path) == accepted
            assert verdict.num_tested == accepted + (wrong_at is not None and wrong_at < fits)
            assert session.output == own[: accepted + 2]
            end(scheduler, session)


def test_a_cut_proposal_with_distributions_is_the_shorter_proposal(scheduler):
    tokens, rng = prompt(20), random.Random(3)
    for method in (VerificationMethod.REJECTION, VerificationMethod.BLOCK):
        long = drafted(prompt(12, 5), rng)
        short = Proposal(long.token_ids[:8], None, long.draft_distributions[:8])
        verdicts = []
        for proposal in (long, short):
            session = Session(tokens, SAMPLED, method)
            ask(scheduler, session)
            verdicts.append(ask(scheduler, session, proposal))
        assert verdicts[0] == verdicts[1]


def test_a_tree_is_refused_with_its_type_and_changes_nothing(scheduler, reference):
    tokens = prompt(20)
    own = plain(reference, tokens, 4)
    session = Session(tokens, SAMPLED)
    ask(scheduler, session)
    refused = ask(scheduler, session, Proposal((own[1], 5), (-1, -1)))
    assert isinstance(refused, InvalidArgumentError)
    assert refused.field == "proposal.parents"
    ask(scheduler, session, own[1:3])
    assert session.output == own


def test_a_worker_without_the_tokens_asks_for_them(scheduler, reference):
    tokens = prompt(30)
    own = plain(reference, tokens, 3)
    session = Session(tokens, SAMPLED)
    session.held = 30
    assert ask(scheduler, session) == NeedTokens(0)
    session.held = 0
    ask(scheduler, session)
    session.tokens.append(own[1])
    session.held = len(session.tokens) + 1
    assert ask(scheduler, session, context=[], base_position=session.held) == NeedTokens(31)
    session.held = 31
    ask(scheduler, session)
    assert session.output == own


def test_a_new_owner_with_other_tokens_is_followed_and_the_old_one_refused(scheduler, reference):
    tokens = prompt(140)
    session = Session(tokens, SAMPLED)
    generate(scheduler, [session], 5)
    old = Session(tokens, SAMPLED, name=session.name)
    old.tokens, old.held = list(session.tokens), session.held
    # The new owner never got the last verdict, and another token stands two places before.
    session.epoch, session.tokens = 2, session.tokens[:-2]
    session.tokens[-1] = (session.tokens[-1] + 1) % 97
    session.held = len(session.tokens) - 1
    own = plain(reference, session.tokens, 4)
    before = len(session.tokens)
    ask(scheduler, session, own[:1])
    ask(scheduler, session, own[2:3])
    assert session.tokens[before:] == own
    assert isinstance(ask(scheduler, old), FailedPreconditionError)
    assert ask(scheduler, session).accepted_path == ()


def test_a_block_that_is_refused_after_a_takeover_leaves_no_stale_request(scheduler, reference):
    """The refused block brings other tokens of the same number; the next one brings no tokens at all."""
    session = Session(prompt(20), SAMPLED)
    generate(scheduler, [session], 3)
    session.epoch = 2
    session.tokens[-1] = (session.tokens[-1] + 1) % 97
    session.held = len(session.tokens) - 1
    assert isinstance(ask(scheduler, session, Proposal((5, 6), (-1, -1))), InvalidArgumentError)
    own, before = plain(reference, session.tokens, 1), len(session.tokens)
    assert ask(scheduler, session, context=[], context_start=before) == NeedTokens(22)
    ask(scheduler, session)
    assert session.tokens[before:] == own


def test_new_parameters_take_effect_with_the_tokens_kept(scheduler, reference):
    session = Session(prompt(140), SAMPLED)
    generate(scheduler, [session], 3)
    session.params = SamplingParams(seed=4, temperature=0.6, frequency_penalty=0.5)
    other = Session(session.prompt, session.params)
    other.tokens = list(session.tokens)
    for each, engine in ((session, scheduler), (other, reference)):
        ask(engine, each, spec=each.spec())
        generate(engine, [each], 8)
    assert session.tokens == other.tokens


def test_release_cancels_blocks_and_ends_the_request(scheduler):
    sessions = [Session(prompt(20, seed), SAMPLED) for seed in range(3)]
    generate(scheduler, sessions, 2)
    tasks = [session.block() for session in sessions]
    scheduler.submit(tasks)
    scheduler.release([Release(sessions[1].name, 0), Release("unknown", 0)])
    replies = {}
    while len(replies) < 3:
        replies |= {reply.session_id: reply.outcome for _, reply in scheduler.step()}
    assert isinstance(replies[sessions[1].name], CancelledError)
    assert sessions[1].name not in set(scheduler.queue.sessions)
    assert ask(scheduler, sessions[1]) == NeedTokens(0)
    assert scheduler.engine.stats().num_sessions == 2


@pytest.mark.parametrize("how", ["cancelled", "expired"])
@pytest.mark.parametrize("state", ["first block", "later block"])
def test_one_block_of_a_batch_ends_early_and_the_others_do_not_notice(scheduler, reference, how, state):
    sessions = [Session(prompt(150, seed), SamplingParams(seed=seed)) for seed in range(4)]
    if state == "later block":
        generate(scheduler, sessions, 1)
    tasks = [session.block() for session in sessions]
    scheduler.submit(tasks)
    replies = (
        {reply.request_id: reply.outcome for _, reply in scheduler.step()} if state == "first block" else {}
    )
    if how == "cancelled":
        tasks[2].cancelled = True
    else:
        tasks[2].deadline = time.monotonic() - 1
    while len(replies) < 4:
        replies |= {reply.request_id: reply.outcome for _, reply in scheduler.step()}
    expected = CancelledError if how == "cancelled" else DeadlineExceededError
    assert isinstance(replies[tasks[2].request_id], expected)
    for session, task in zip(sessions, tasks, strict=True):
        if task is not tasks[2]:
            session.tokens.append(replies[task.request_id].next_token_id)
            session.held = task.base_position
    # The session itself goes on as well.
    generate(scheduler, sessions, 5)
    for session in sessions:
        assert session.output == plain(reference, session.prompt, 5, session.params)
