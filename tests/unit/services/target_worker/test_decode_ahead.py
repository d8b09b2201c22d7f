"""Decoding ahead: the tokens that single blocks get, up to the bound, an end token or another block."""

from typing import Any

import pytest

from gammaray.blocks import Shape
from gammaray.errors import CancelledError
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.engine.loader import load_engine
from services.own.target_scheduler import TargetScheduler
from services.scheduling import decode_ahead
from services.scheduling.tasks import AheadTokens, Release, VerifyTask
from tests.support.engine_helpers import LIMITS, random_tokens, tiny_model
from tests.support.target_helpers import Run
from tests.support.vllm_helpers import NOTHING

PROMPT = random_tokens(20, seed=3)
PARAMS = SamplingParams(temperature=1.0, seed=7, frequency_penalty=0.5)
PLAIN = Shape(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture
def scheduler(model):
    return TargetScheduler(load_engine(str(model)), LIMITS)


def plain_tokens(model: Any, count: int, **fields: Any) -> list[int]:
    run = Run(TargetScheduler(load_engine(str(model)), LIMITS), PROMPT, PARAMS, **fields)
    for _ in range(count):
        run.cycle(PLAIN)
    return run.tokens[len(PROMPT) :]


def ask(run: Run, num_ahead: int = 30, proposal: Proposal = NOTHING) -> VerifyTask:
    """Ask for one token and `num_ahead` more; return the block, whose verdict the run has taken."""
    block = run.block(PLAIN, proposal)
    block.num_ahead = num_ahead
    run.ask(block)
    return block


def decoded(scheduler: TargetScheduler, run: Run, num_ahead: int) -> list[AheadTokens]:
    """Ask for one token and `num_ahead` more; return those, and let the run commit all of them."""
    ask(run, num_ahead)
    messages = []
    while scheduler.has_work:
        messages += [reply.outcome for _, reply in scheduler.step()]
    for message in messages:
        assert message.base_position == len(run.tokens)
        run.tokens += message.token_ids
    return messages


@pytest.mark.parametrize("method", list(VerificationMethod))
@pytest.mark.parametrize("period_s", [0.0, 1e9], ids=["each", "at the end"])
def test_tokens_are_those_of_single_blocks(model, scheduler, method, period_s, monkeypatch):
    monkeypatch.setattr(decode_ahead, "AHEAD_PERIOD_S", period_s)
    run = Run(scheduler, PROMPT, PARAMS, method)
    for num_ahead in (5, 0, 3, 1):
        messages = decoded(scheduler, run, num_ahead)
        count = num_ahead if period_s == 0 else min(num_ahead, 1)
        assert [message.is_last for message in messages] == [False, False, False, False, True][5 - count :]
    assert run.tokens[len(PROMPT) :] == plain_tokens(model, 13, method=method)


def test_an_end_token_is_the_last(model, scheduler):
    tokens = plain_tokens(model, 8)
    end = next(token for token in tokens[2:] if token not in tokens[:2])
    run = Run(scheduler, PROMPT, PARAMS, eos_token_ids=(end,))
    (message,) = decoded(scheduler, run, 30)
    assert message.is_last
    assert message.token_ids[-1] == end
    assert end not in message.token_ids[:-1]
    assert run.tokens[len(PROMPT) :] == plain_tokens(model, len(message.token_ids) + 1, eos_token_ids=(end,))


def test_another_block_ends_it_and_gets_its_own_tokens(model, scheduler):
    run = Run(scheduler, PROMPT, PARAMS)
    ask(run)
    for _ in range(3):
        scheduler.step()
    scheduler.submit([run.block(PLAIN)])
    (_, ahead), (_, reply) = scheduler.step()  # not after the 27 tokens that are left
    assert (ahead.is_ahead, reply.is_ahead) == (True, False)
    assert [*run.tokens[len(PROMPT) :], reply.outcome.next_token_id] == plain_tokens(model, 2)
    assert not scheduler.has_work


def test_a_release_ends_it(scheduler):
    block = ask(Run(scheduler, PROMPT, PARAMS))
    scheduler.step()
    scheduler.release([Release(block.session_id, block.epoch)])
    ((_, reply),) = scheduler.step()
    assert reply.is_ahead
    assert isinstance(reply.outcome, CancelledError)
    assert not scheduler.has_work


def test_a_block_with_a_proposal_is_not_decoded_ahead(scheduler):
    ask(Run(scheduler, PROMPT, PARAMS), 5, Proposal((5, 6)))
    assert not scheduler.has_work


def test_what_was_sent_a_part_goes_behind_the_blocks_that_came_meanwhile(scheduler, monkeypatch):
    monkeypatch.setattr(decode_ahead, "AHEAD_PERIOD_S", 0.0)
    run, newcomer = Run(scheduler, PROMPT, PARAMS), Run(scheduler, random_tokens(90, seed=4), PARAMS)
    scheduler.batcher.budget.num_tokens = 30  # the newcomer's prompt takes several steps
    ask(run)
    scheduler.submit([newcomer.block(PLAIN)])
    orders = []
    for _ in range(2):
        scheduler.step()
        orders.append([*scheduler.queue.running])
    assert orders[-1] == [newcomer.name, run.name]
