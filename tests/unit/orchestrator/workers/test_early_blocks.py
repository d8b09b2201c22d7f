"""Blocks sent before a verdict: for likely outcomes of the block in progress, and used for no other one."""

from types import SimpleNamespace

import pytest

from gammaray.types import Proposal, SamplingParams, VerificationMethod
from gammaray.v1 import target_service_pb2 as pb
from orchestrator.cycle.session import Session
from orchestrator.workers.early_blocks import MAX_EARLY, EarlyBlocks

NEXT = Proposal((5, 6))


@pytest.fixture
def session():
    return make_session()


def make_session(**fields):
    fields = {"method": VerificationMethod.COUPLED, "params": SamplingParams(seed=1), **fields}
    return Session("s", (1, 2, 3), max_tokens=20, text=SimpleNamespace(push=lambda token: False), **fields)


def begun(session, *outcomes):
    """Return the early blocks of a session whose first block is verified, sent for these outcomes."""
    early = EarlyBlocks()
    early.begin(session)
    for outcome in outcomes:
        early.offer(session, outcome, NEXT)
    send(early, session)
    return early


def send(early, session):
    link = SimpleNamespace(post=lambda block: None)
    sent = early.wanted(session)
    for outcome, proposal in sent:
        block = pb.VerifyBlock()
        early.send(session, link, outcome, proposal, block)
        assert block.is_conditional
        assert block.base_position == session.num_committed + len(outcome)
        assert (block.context.start, tuple(block.context.token_ids)) == (session.num_committed, outcome)
    return sent


def test_a_block_is_used_only_after_the_tokens_that_it_was_sent_for(session):
    early = begun(session, (7, 8), (7, 9))
    session.commit((7, 9))
    found = early.take(session, NEXT)
    assert (found.outcome, found.end) == ((7, 9), 5)
    assert early.take(session, NEXT) is None
    for other in ((7, 5), (8, 9), (7,), (7, 9, 4)):
        early, later = begun(make_session(), (7, 8), (7, 9)), make_session()
        later.commit(other)
        assert early.take(later, NEXT) is None


@pytest.mark.parametrize(
    ("proposal", "is_used"), [((5, 6), True), ((5,), True), ((), False), ((5, 7), False), ((5, 6, 1), False)]
)
def test_a_block_is_used_for_its_proposal_or_the_beginning_of_it(session, proposal, is_used):
    early = begun(session, (7,))
    session.commit((7,))
    assert (early.take(session, Proposal(proposal)) is not None) == is_used


def test_a_block_is_used_for_no_tree(session):
    early = begun(session, (7,))
    session.commit((7,))
    assert early.take(session, Proposal((5, 6), (-1, -1))) is None


def test_blocks_follow_that_of_the_cycle_and_are_few(session):
    early = EarlyBlocks()
    early.offer(session, (7,), NEXT)
    assert not send(early, session)  # the block of the cycle is not sent yet
    early.begin(session)
    assert len(send(early, session)) == 1
    for token in (7, 8, 9, 10):
        early.offer(session, (token,), NEXT)
    assert [outcome for outcome, _ in send(early, session)] == [(8,)]
    assert MAX_EARLY == 2
    early.begin(session)  # sent again, as the worker lacked tokens: it does not know the others either
    session.commit((7,))
    assert early.take(session, NEXT) is None


@pytest.mark.parametrize(
    ("fields", "outcome", "proposal"),
    [
        pytest.param({"method": VerificationMethod.REJECTION}, (7,), NEXT, id="the proposal counts"),
        pytest.param({"params": SamplingParams(seed=1, grammar="g")}, (7,), NEXT, id="grammar"),
        pytest.param({"num_prompt_logprobs": 0}, (7,), NEXT, id="scores of the prompt"),
        pytest.param({"eos_token_ids": frozenset({7})}, (3, 7), NEXT, id="end of the completion"),
        pytest.param({}, (7,) * 18, NEXT, id="no room"),
        pytest.param({}, (7,), Proposal(), id="nothing proposed"),
        pytest.param({}, (7,), Proposal((5, 6), (-1, -1)), id="tree"),
    ],
)
def test_some_proposals_are_not_sent_early(fields, outcome, proposal):
    session, early = make_session(**fields), EarlyBlocks()
    early.begin(session)
    early.offer(session, outcome, proposal)
    assert not early.wanted(session)
