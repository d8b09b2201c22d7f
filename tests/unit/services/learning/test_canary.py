"""The comparison of a candidate with the stable version: errors, and how soon it decides."""

import random

import pytest

from services.learning.canary import ENOUGH, MIN_PARTS, MOST, Canary, Decision


def decided(stable, candidate, seed, share=1 / 3, span=16, spread=0.0):
    """Return the decision on two rates, and after how many proposals of the candidate.

    Which version drafts is drawn again after `span` proposals; the rates of texts of 48 proposals differ by
    `spread`, up or down. The decision is asked for after each 16 proposals.
    """
    rng, canary, count = random.Random(seed), Canary(), 0
    is_candidate, shift = False, 0.0
    for number in range(10**6):
        if number % 48 == 0:
            shift = rng.choice((-spread, spread))
        if number % span == 0:
            is_candidate = rng.random() < share
        count += is_candidate
        is_accepted = rng.random() < (candidate if is_candidate else stable) + shift
        canary.add(("", number // span), is_accepted, is_candidate=is_candidate)
        if number % 16 == 15 and (decision := canary.decide()) is not Decision.WAIT:
            return decision, count
    raise AssertionError("no decision")


def test_useless_candidate_is_rolled_back_at_once():
    found = [decided(0.45, 0.0, seed) for seed in range(100)]
    assert {decision for decision, _ in found} == {Decision.ROLL_BACK}
    assert max(count for _, count in found) <= 5 * MIN_PARTS * 16


@pytest.mark.parametrize("rate", [0.1, 0.45, 0.9])
def test_better_candidate_is_never_rolled_back_early(rate):
    """With a probability of `ERROR`; 200 runs with fixed seeds."""
    found = [decided(rate, rate + 0.05, seed) for seed in range(200)]
    early = [decision for decision, count in found if decision is Decision.ROLL_BACK and count < MOST]
    assert len(early) <= 2


@pytest.mark.parametrize("span", [16, 48])
def test_easy_and_hard_sessions_do_not_decide(span):
    """Half of the texts accept twice as often as the others, and each version drafts some of each, or not."""
    found = [decided(0.4, 0.45, seed, span=span, spread=0.15) for seed in range(200)]
    early = [decision for decision, count in found if decision is Decision.ROLL_BACK and count < ENOUGH]
    assert len(early) <= 4


def test_candidate_without_any_gain_is_decided_in_the_end():
    assert decided(0.45, 0.4, 3)[1] <= MOST
    canary = Canary()
    for at in range(ENOUGH):
        canary.add(("", at // 16), at % 2 == 0, is_candidate=True)
        canary.add(("", at // 16), at % 2 == 0, is_candidate=False)
    assert canary.decide() is Decision.WAIT
    canary.add(("", 0), True, is_candidate=True)
    assert canary.decide() is Decision.PROMOTE
    assert str(canary) == "first tokens accepted: 151 of 301, of the stable version 150 of 300"
