"""The gain of drafting, from the times of requests and results and the committed tokens."""

import pytest

from gammaray.types import Proposal
from services.speculation.gain import GainMeter, num_accepted

CHAIN = Proposal((7, 8, 9))
#        7 ─ 8
#   root ┤
#        5 ─ 6
TREE = Proposal((7, 5, 8, 6), (-1, -1, 0, 1))


@pytest.mark.parametrize(
    ("proposal", "emitted", "accepted"),
    [
        (CHAIN, [7, 8, 9, 1], 3),
        (CHAIN, [7, 1], 1),
        (CHAIN, [1], 0),
        (CHAIN, [7], 1),
        (Proposal(), [7], 0),
        (TREE, [5, 6, 1], 2),
        (TREE, [7, 6], 1),
        (TREE, [8, 6], 0),
        (TREE, [5, 8], 1),
    ],
)
def test_accepted_tokens_are_the_path_of_committed_tokens(proposal, emitted, accepted):
    assert num_accepted(proposal, emitted) == accepted


def test_gain_is_accepted_tokens_minus_the_cost_of_waiting():
    meter = GainMeter()
    meter.sent("a", CHAIN, base_position=10, asked=0.0, answered=0.1)
    meter.asked("a", [0] * 10 + [7, 8, 1], arrived=0.3)  # 2 accepted, one step of 0.2 s, half of it waited
    assert meter.gained == pytest.approx(2 - 0.5)


def test_steps_without_a_proposal_in_between_count_as_steps():
    meter = GainMeter()
    meter.sent("a", CHAIN, base_position=2, asked=0.0, answered=0.1)
    meter.asked("a", [0, 0, 7, 1, 2, 3], arrived=0.7)  # 1 accepted, 3 steps of 0.2 s
    assert meter.gained == pytest.approx(1 - 0.5)


def test_slow_draft_loses_and_never_more_than_the_longest_proposal():
    meter = GainMeter()
    meter.sent("a", CHAIN, base_position=1, asked=0.0, answered=1.0)
    meter.asked("a", [0, 1], arrived=1.1)
    assert meter.gained == pytest.approx(-10)
    meter.sent("a", CHAIN, base_position=1, asked=0.0, answered=1e6)
    meter.asked("a", [0, 1], arrived=1e6)
    assert meter.gained == pytest.approx(-74)


def test_retried_and_dropped_requests_gain_nothing():
    meter = GainMeter()
    meter.sent("a", CHAIN, base_position=2, asked=0.0, answered=0.1)
    meter.asked("a", [0, 0], arrived=0.2)
    meter.asked("a", [0, 0, 7, 8], arrived=0.3)
    meter.sent("b", CHAIN, base_position=2, asked=0.0, answered=0.1)
    meter.drop("b")
    meter.asked("b", [0, 0, 7, 8], arrived=0.3)
    meter.asked("c", [0, 0, 7, 8], arrived=0.3)
    assert meter.gained == 0
