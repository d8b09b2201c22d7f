"""The sequential test errs no more often than it says, whenever it is stopped, and decides soon."""

import math
import random

import pytest

from gammaray.maths.sequential import evidence
from tests.support.theory import expected_tokens

ERROR = 0.05
RUNS = 400


def tokens_of_cycles(alpha, gamma, number, generator):
    """Tokens of cycles in which each tested token is accepted with probability alpha."""
    found = []
    for _ in range(number):
        accepted = 0
        while accepted < gamma and generator.random() < alpha:
            accepted += 1
        found.append(accepted + 1)
    return found


@pytest.mark.parametrize(("alpha", "gamma"), [(0.05, 8), (0.5, 1), (0.5, 4), (0.9, 8)])
def test_true_hypothesis_is_ever_rejected_with_at_most_the_error(alpha, gamma):
    """At the bound itself both hypotheses are true; the largest capital is over all times to stop.

    With an error of exactly 0.05, 400 runs have at most 32 rejections with a probability of 0.995.
    """
    generator = random.Random(7)
    bound = expected_tokens(alpha, gamma)
    wrong = [0, 0]
    for _ in range(RUNS):
        found = evidence(tokens_of_cycles(alpha, gamma, 300, generator), bound, 1, gamma + 1)
        for side in range(2):
            wrong[side] += found[side] >= -math.log(ERROR)
    assert max(wrong) <= 32


def test_hypothesis_holds_for_means_that_change_with_what_came_before():
    """Cycles vary more after some than after others; their mean, given the past, stays at the bound."""
    generator = random.Random(8)
    wrong = 0
    for _ in range(RUNS):
        values, wide = [], False
        for _ in range(300):
            values.append(generator.choice((1.0, 5.0)) if wide else 3.0)
            wide = values[-1] != 5.0
        wrong += max(evidence(values, 3.0, 1, 5)) >= math.log(2 / ERROR)
    assert wrong <= 32


@pytest.mark.parametrize(
    ("alpha", "gamma", "needed", "soon"), [(0.02, 8, 4.0, 20), (0.05, 1, 1.6, 30), (0.3, 4, 2.5, 80)]
)
def test_useless_draft_is_decided_within_few_cycles(alpha, gamma, needed, soon):
    generator = random.Random(9)
    values = tokens_of_cycles(alpha, gamma, soon, generator)
    below, above = evidence(values, needed, 1, gamma + 1)
    assert below > -math.log(0.01)
    assert above < 1.0


def test_good_draft_is_decided_for_and_one_at_the_bound_is_not_decided():
    values = tokens_of_cycles(0.8, 4, 100, random.Random(10))
    below, above = evidence(values, 2.5, 1, 5)
    assert above > -math.log(0.01)
    assert below < 1.0
    even = [1.0, 3.0] * 100
    assert max(evidence(even, 2.0, 1, 5)) < -math.log(0.05)


def test_bounds_that_no_mean_reaches_need_no_values():
    assert evidence([], 6.0, 1, 5) == (math.inf, 0.0)
    assert evidence([], 0.5, 1, 5) == (0.0, math.inf)
    assert evidence([], 3.0, 1, 5) == (0.0, 0.0)
