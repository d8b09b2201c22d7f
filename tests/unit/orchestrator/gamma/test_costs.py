"""Waits of two kinds: what was prepared is at hand, what was not takes a round trip and forwards."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from test_gamma_stop import cycle

from orchestrator.cycle.types import Shape
from orchestrator.gamma.cost_model import WARM_UP, CostModel, HitRates

PREPARED_S, ASKED_S, TOKEN_S = 0.05e-3, 2e-3, 0.3e-3


def looked_up(rates: dict[int, float], num_lookups: int, seed: int = 1) -> HitRates:
    rng, hits = random.Random(seed), HitRates()
    for _ in range(num_lookups):
        depth = rng.choice(list(rates))
        hits.observe(depth, 1.0, is_hit=rng.random() < rates[depth])
    return hits


def test_without_a_hit_none_is_expected():
    hits = HitRates()
    assert hits.rate(4) == 0
    for _ in range(50):
        hits.observe(4, 1.0, is_hit=False)
    assert hits.rate(1) == hits.rate(4) == 0


def test_rate_of_the_depth_that_was_played_is_its_mean_and_falls_with_depth():
    hits = HitRates()
    for index in range(400):
        hits.observe(4, 1.0, is_hit=index % 2 == 0)
    assert hits.rate(4) == pytest.approx(0.5, abs=0.01)
    assert hits.rate(2) > 0.6 > 0.45 > hits.rate(8) > 0.3
    assert hits.rate(0) == 0


def test_rates_that_differ_are_told_apart():
    steep = looked_up({2: 0.95, 8: 0.2}, 4000)
    assert steep.rate(2) > 0.8
    assert steep.rate(8) < 0.35
    flat = looked_up({2: 0.6, 8: 0.6}, 4000)
    assert flat.rate(2) - flat.rate(8) < 0.25


def test_rate_follows_a_change():
    hits = looked_up({4: 1.0}, 200)
    for _ in range(300):
        hits.observe(4, 1.0, is_hit=False)
    assert hits.rate(4) < 0.15


def played(hit_rates: dict[int, float], num_cycles: int, seed: int = 2) -> CostModel:
    """A drafter whose proposals are at hand with a probability that depends on the depth."""
    rng, costs, before = random.Random(seed), CostModel(), 0
    for _ in range(num_cycles):
        depth = rng.choice(list(hit_rates))
        is_prepared = before > 0 and rng.random() < hit_rates[before]
        wait_s = PREPARED_S if is_prepared else ASKED_S + TOKEN_S * depth
        made = replace(cycle(Shape(depth), depth, depth // 2), draft_s=wait_s, is_prepared=is_prepared)
        costs.observe(made, depth_before=before)
        before = depth
    return costs


@pytest.mark.parametrize("depth", [2, 6])
def test_expected_wait_is_the_mean_of_both_kinds(depth):
    rates = {2: 0.8, 6: 0.4}
    costs = played(rates, 3000)
    expected = rates[depth] * PREPARED_S + (1 - rates[depth]) * (ASKED_S + TOKEN_S * depth)
    assert costs.draft_s(Shape(depth)) == pytest.approx(expected, rel=0.25)


def test_luck_does_not_move_what_a_miss_takes():
    """A row of hits, or of misses, is no change of speed: only the rate follows."""
    costs = played({4: 0.5}, 500)
    missed = cycle(Shape(4), 4, 2)
    for _ in range(40):
        costs.observe(replace(missed, draft_s=PREPARED_S, is_prepared=True), depth_before=4)
    for _ in range(200):
        wait_s = ASKED_S + TOKEN_S * 4
        costs.observe(replace(missed, draft_s=wait_s), depth_before=4)
    # 200 misses leave a fifth of the hits before in the rate.
    rate = costs.hits.rate(4)
    assert 0.05 < rate < 0.25
    assert costs.draft_s(Shape(4)) == pytest.approx(
        rate * PREPARED_S + (1 - rate) * (ASKED_S + TOKEN_S * 4), rel=0.05
    )


def test_before_anything_was_asked_for_nothing_is_known():
    costs = CostModel()
    assert costs.draft_s(Shape(4)) is None
    prepared = replace(cycle(Shape(4), 4, 2), draft_s=PREPARED_S, is_prepared=True)
    for _ in range(2 * WARM_UP):
        costs.observe(prepared, depth_before=4)
    assert costs.draft_s(Shape(4)) is None
