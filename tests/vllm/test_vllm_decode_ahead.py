"""Decoding ahead with vLLM: the tokens that single blocks get, whatever ends it."""

import pytest

from gammaray.types import SamplingParams
from services.scheduling import decode_ahead
from services.scheduling.tasks import AheadTokens
from services.vllm.engine import MAX_REQUESTS
from tests.support.vllm_helpers import GREEDY, Session, ask, end, prompt, references
from tests.vllm.conftest import BLOCK, free_blocks

SAMPLED = SamplingParams(seed=5)
EDITED = SamplingParams(seed=6, temperature=0.7, top_p=0.9, frequency_penalty=0.5)


def sessions():
    return [Session(prompt(10 + 30 * at), params) for at, params in enumerate((GREEDY, SAMPLED, EDITED))]


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


def check(scheduler, reference, asked):
    """Compare the tokens of sessions with those of the CPU engine's single blocks, and end them."""
    fresh = [Session(one.prompt, one.params) for one in asked]
    plain = references(reference, fresh, max(len(one.output) for one in asked))
    for one, tokens in zip(asked, plain, strict=True):
        assert one.output == tokens[: len(one.output)]
        end(scheduler, one)


@pytest.mark.parametrize("period_s", [0.0, 1e9], ids=["each", "at the end"])
def test_tokens_are_those_of_single_blocks(scheduler, reference, period_s, monkeypatch):
    monkeypatch.setattr(decode_ahead, "AHEAD_PERIOD_S", period_s)
    asked = sessions()
    for num_ahead in (5, 0, 1, 70):
        messages = decoded(scheduler, asked, num_ahead)
        assert len(messages) == len(asked) * (num_ahead if period_s == 0 else min(num_ahead, 1))
        assert sum(message.is_last for message in messages) == (len(asked) if num_ahead else 0)
    assert {len(one.output) for one in asked} == {80}
    check(scheduler, reference, asked)


def test_the_last_token_of_the_context_is_decoded_ahead(scheduler, reference):
    session = Session(prompt(scheduler.engine.max_context - 5), SAMPLED)
    decoded(scheduler, [session], 5)
    assert len(session.output) == 6
    check(scheduler, reference, [session])


def test_another_block_ends_it_and_gets_its_own_tokens(scheduler, reference):
    session = Session(prompt(20), SAMPLED)
    ask(scheduler, session, num_ahead=30)
    for _ in range(4):
        scheduler.step()
    task = session.block()
    scheduler.submit([task])
    (_, reply), (_, answer) = scheduler.step()  # not after the 26 tokens that are left
    assert reply.is_ahead
    session.take(task, answer)
    assert not scheduler.has_work
    check(scheduler, reference, [session])


def test_sessions_that_outgrow_the_memory_go_on_with_their_next_block(scheduler, reference):
    asked = [Session(prompt(BLOCK - 6, seed), SAMPLED) for seed in range(5)]
    with free_blocks(scheduler, 6):
        while active := [one for one in asked if len(one.output) < 12]:
            decoded(scheduler, active, 8)
    check(scheduler, reference, asked)


def test_it_ends_where_other_sessions_wait_for_a_place(scheduler, reference, monkeypatch):
    monkeypatch.setattr(decode_ahead, "AHEAD_PERIOD_S", 1e9)
    asked = [Session(prompt(3, seed), SAMPLED) for seed in range(MAX_REQUESTS + 8)]
    messages = decoded(scheduler, asked, 30)
    assert {len(message.token_ids) for message in messages} > {30}
    check(scheduler, reference, asked)
