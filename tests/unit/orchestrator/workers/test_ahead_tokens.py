"""Tokens decoded ahead: only those that the last block asked for are taken, and the end of them is known."""

import pytest

from gammaray.v1 import target_service_pb2 as pb
from gammaray.v1 import types_pb2
from orchestrator.workers import ahead_tokens
from orchestrator.workers.ahead_tokens import AheadCache


def message(base_position, *token_ids, request_id=7, **fields):
    return pb.AheadTokens(request_id=request_id, base_position=base_position, token_ids=token_ids, **fields)


@pytest.fixture
def ahead():
    cache = AheadCache()
    cache.expect(pb.VerifyBlock(request_id=7, num_ahead=3), 10)
    return cache


def test_all_that_has_arrived_is_one_verdict(ahead):
    assert ahead.follow(10)
    assert not ahead.follow(11)
    ahead.put(message(10, 1))
    ahead.put(message(11, 2, 3, is_last=True))
    verdict = ahead.take(97, has_logprobs=False)
    assert (verdict.next_token_id, verdict.further_token_ids) == (1, (2, 3))
    assert not ahead.follow(13)


def test_the_seconds_of_a_token_are_those_between_messages(ahead, monkeypatch):
    now = iter([5.0, 5.6, 9.0])
    monkeypatch.setattr(ahead_tokens.time, "perf_counter", lambda: next(now))
    ahead.put(message(10, 1))
    assert ahead.take(97, has_logprobs=False).ahead_s == 0.0  # unknown: nothing came before
    ahead.put(message(11, 2, 3))
    assert ahead.take(97, has_logprobs=False).ahead_s == pytest.approx(0.3)
    ahead.expect(pb.VerifyBlock(request_id=7, num_ahead=3), 13)
    ahead.put(message(13, 1))
    assert ahead.take(97, has_logprobs=False).ahead_s == 0.0


@pytest.mark.parametrize(
    "wrong", [None, message(11, 1), message(10, 1, 2, 3, 4), message(10, is_last=True)], ids=str
)
def test_what_does_not_follow_ends_it(ahead, wrong):
    ahead.put(wrong)
    assert not ahead.follow(10)


def test_of_another_block_is_ignored_and_an_error_is_kept(ahead):
    ahead.put(message(10, 9, request_id=6))
    assert ahead.follow(10)
    ahead.put(message(0, is_last=True, error=types_pb2.BlockError(code=1, message="released")))
    assert ahead.follow(10)
    assert ahead.take(97, has_logprobs=False) is None
    assert ahead.error.message == "released"
