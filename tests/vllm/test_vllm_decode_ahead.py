"""Decoding ahead with vLLM: the tokens that single blocks get, whatever ends it."""

import pytest

from gammaray.errors import CancelledError
from gammaray.types import SamplingParams
from services.scheduling import decode_ahead
from services.scheduling.tasks import AheadTokens, Release
from services.vllm.engine import MAX_REQUESTS
from tests.support.vllm_helpers import GREEDY, Session, ask, end, prompt, references
from tests.vllm.conftest import BLOCK, free_blocks

PARAMS = (
    GREEDY,
    SamplingParams(seed=5),
    SamplingParams(seed=6, temperature=0.7, top_p=0.9, frequency_penalty=0.5),
)


def sessions(**fields):
    return [Session(prompt(10 + 30 * at), params, **fields) for at, params in enumerate(PARAMS)]


def decoded(scheduler, asked, num_ahead):
    """Ask for a token of each session and more; commit all that comes, and return the messages."""
    tasks = {one.name: one.block(num_ahead=num_ahead) for one in asked}
    scheduler.submit(tasks.values())
    messages, of = [], {one.name: one for one in asked}
    while scheduler.has_work:
        for _, reply in scheduler.step():
            session = of[reply.session_id]
            if not reply.is_ahead:
                assert session.take(tasks[session.name], reply).is_followed == (num_ahead > 0)
                continue
            assert isinstance(reply.outcome, AheadTokens), reply.outcome
            assert reply.outcome.base_position == len(session.tokens)
            session.tokens += reply.outcome.token_ids
            messages.append(reply.outcome)
    for one in asked:
        one.held = len(one.tokens)
    return messages


@pytest.mark.parametrize("period_s", [0.0, 1e9], ids=["each", "at the end"])
def test_tokens_are_those_of_single_blocks(scheduler, reference, period_s, monkeypatch):
    monkeypatch.setattr(decode_ahead, "AHEAD_PERIOD_S", period_s)
    asked = sessions()
    for num_ahead in (5, 0, 1, 70):
        messages = decoded(scheduler, asked, num_ahead)
        count = num_ahead if period_s == 0 else min(num_ahead, 1)
        assert len(messages) == count * len(asked)
        assert sum(message.is_last for message in messages) == (len(asked) if num_ahead else 0)
    assert [one.output for one in asked] == references(reference, sessions(), 80)
    for one in asked:
        end(scheduler, one)


def test_an_end_token_is_the_last(scheduler, reference):
    (tokens,) = references(reference, [Session(prompt(20), PARAMS[1])], 30)
    session = Session(prompt(20), PARAMS[1], eos_token_ids=(tokens[9],))
    decoded(scheduler, [session], 29)
    assert session.output == tokens[: tokens.index(tokens[9]) + 1]
    end(scheduler, session)


def test_another_block_ends_it_and_gets_its_own_tokens(scheduler, reference):
    session = Session(prompt(20), PARAMS[1])
    ask(scheduler, session, num_ahead=30)
    for _ in range(4):
        scheduler.step()
    for _ in range(3):
        ask(scheduler, session)
    assert session.output == references(reference, [Session(prompt(20), PARAMS[1])], 4)[0]
    assert not scheduler.has_work
    end(scheduler, session)


def test_a_release_ends_it(scheduler):
    session = Session(prompt(20), PARAMS[1])
    ask(scheduler, session, num_ahead=30)
    scheduler.step()
    scheduler.release([Release(session.name, session.epoch)])
    replies = [reply for _, reply in scheduler.step()]
    assert [type(reply.outcome) for reply in replies if reply.is_ahead] == [CancelledError]
    assert not scheduler.has_work


def test_blocks_with_a_proposal_are_not_followed(scheduler):
    session = Session(prompt(20), PARAMS[1])
    ask(scheduler, session, [5, 6], num_ahead=30)
    assert not scheduler.has_work
    end(scheduler, session)


def test_sessions_that_outgrow_the_memory_go_on_with_their_next_block(scheduler, reference):
    asked = [Session(prompt(BLOCK - 6, seed), PARAMS[1]) for seed in range(5)]
    with free_blocks(scheduler, 6):
        while min(len(one.output) for one in asked) < 12:
            decoded(scheduler, [one for one in asked if len(one.output) < 12], 8)
    for one, tokens in zip(
        asked, references(reference, [Session(one.prompt, PARAMS[1]) for one in asked], 30), strict=True
    ):
        assert one.output == tokens[: len(one.output)]
        end(scheduler, one)


def test_it_ends_where_other_sessions_wait_for_a_place(scheduler):
    asked = [Session(prompt(3, seed), PARAMS[1]) for seed in range(MAX_REQUESTS + 8)]
    decoded(scheduler, asked[:8], 0)
    messages = decoded(scheduler, asked, 30)
    assert any(message.is_last and len(message.token_ids) < 30 for message in messages)
    for one in asked:
        end(scheduler, one)
