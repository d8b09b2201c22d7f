"""Pauses after failures, and how long an answer is waited for; the clock is an argument of the test."""

from types import SimpleNamespace

import pytest

from orchestrator.workers import backoff
from orchestrator.workers.backoff import MAX_PAUSE_S, PRICE, AdaptiveTimeout, Backoff


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(backoff, "time", clock)
    return clock


def test_backoff_pauses_for_a_multiple_of_what_was_lost_and_doubles(clock):
    pauses = Backoff()
    expected = PRICE * 0.5
    for _ in range(3):
        clock.now += 0.5
        pauses.failed(0.5)
        clock.now += 0.99 * expected
        assert not pauses.ready
        clock.now += 0.02 * expected
        assert pauses.ready
        expected *= 2
    pauses.succeeded()
    pauses.failed(0.5)
    clock.now += 1.01 * PRICE * 0.5
    assert pauses.ready


MANY, TOGETHER = (30, 2 * MAX_PAUSE_S, 1.0, MAX_PAUSE_S), (8, 0.001, 0.5, 1.05 * PRICE * 0.5)


@pytest.mark.parametrize(("count", "apart_s", "lost_s", "pause_s"), [MANY, TOGETHER])
def test_backoff_has_a_longest_pause_and_counts_what_fails_together_once(
    clock, count, apart_s, lost_s, pause_s
):
    pauses = Backoff()
    for _ in range(count):
        clock.now += apart_s
        pauses.failed(lost_s)
    clock.now += pause_s
    assert pauses.ready


def test_backoff_lets_one_try_for_all(clock):
    pauses = Backoff()
    pauses.trying(2.0)
    assert pauses.ready, "nothing failed yet: everybody may try"
    pauses.failed(0.5)
    clock.now += 60.0
    assert pauses.ready
    pauses.trying(2.0)
    assert not pauses.ready
    clock.now += 2.0
    assert pauses.ready, "former attempts are forgotten"


def test_backoff_sign_of_life_ends_a_first_pause_only(clock):
    pauses = Backoff()
    pauses.failed(0.5)
    pauses.note_late_answer()
    assert pauses.ready
    clock.now += 1.0
    pauses.failed(0.5)
    pauses.note_late_answer()
    assert not pauses.ready


def test_timeout_follows_answers_between_its_least_and_the_limit():
    timeout = AdaptiveTimeout(least_s=0.25)
    assert timeout.wait_s(2.0) == 2.0, "nothing is known"
    for _ in range(50):
        timeout.observe(0.01)
    assert timeout.wait_s(2.0) == 0.25
    for _ in range(50):
        timeout.observe(0.2)
    assert 0.8 <= timeout.wait_s(2.0) < 1.2
    for _ in range(20):
        timeout.observe(1.5)
    assert timeout.wait_s(2.0) == 2.0
