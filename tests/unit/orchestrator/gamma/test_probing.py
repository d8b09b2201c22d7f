"""Probes: when they are due, what they may cost, and what is made of what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_gamma_stop import cycle

from orchestrator.cycle.types import Shape
from orchestrator.gamma.adaptive import AdaptiveGamma
from orchestrator.gamma.cost_model import CostModel
from orchestrator.gamma.exploration import BURSTS, OVERDUE, Bursts, Prospects
from orchestrator.gamma.fixed import FixedGamma, Reason
from orchestrator.gamma.shapes import (
    FREE_PROBES,
    MIN_GAP,
    MOST_LOST,
    PROBE_SHARE,
    Family,
    ProbeSchedule,
)

PLAIN_S = 2e-3


def confirmed(kind: Family = Family.CHAIN, lost: float = 0.0, share: float = 0.5) -> ProbeSchedule:
    """A schedule whose first, free probes of a kind confirmed that it is slow."""
    schedule = ProbeSchedule()
    for _ in range(FREE_PROBES):
        schedule.probed(kind, share, share, lost)
    return schedule


def test_first_probes_are_free_and_later_ones_wait_for_what_they_are_expected_to_cost():
    assert ProbeSchedule().needed_wait(Family.CHAIN, 3, 10.0) == 0
    assert confirmed().needed_wait(Family.CHAIN, 3, 0.2) == pytest.approx(3 * 0.2 / PROBE_SHARE)


@pytest.mark.parametrize("kind", [Family.CHAIN, Family.TREE])
def test_probes_that_cost_more_than_expected_wait_longer_up_to_a_bound(kind):
    wait = confirmed(kind, lost=0.4).needed_wait(kind, 3, 0.01)
    assert 3 * 0.3 / PROBE_SHARE < wait < 3 * 0.4 / PROBE_SHARE
    assert confirmed(kind, lost=50.0).needed_wait(kind, 1, 0.01) == pytest.approx(MOST_LOST / PROBE_SHARE)


def test_what_probes_of_plain_decoding_cost_is_known_to_the_model():
    wait = confirmed(Family.PLAIN, lost=0.4).needed_wait(Family.PLAIN, 1, 0.01)
    assert wait == pytest.approx(0.01 / PROBE_SHARE)


def test_probe_that_gained_is_repeated_soon():
    assert confirmed(lost=-0.5).needed_wait(Family.CHAIN, 3, 0.0) == 0


def test_close_is_looked_at_again_soon_and_yet_has_its_price():
    schedule = confirmed(share=0.95)
    schedule.clock = 2.0 * MIN_GAP - 1
    assert schedule.waited(Family.CHAIN, 0) is None
    schedule.clock += 1
    assert schedule.waited(Family.CHAIN, 0) == 2 * MIN_GAP
    assert schedule.needed_wait(Family.CHAIN, 3, 0.2) > 0


def test_refuted_belief_makes_probes_free_again():
    schedule = confirmed()
    schedule.probed(Family.CHAIN, 0.9, 0.5, 0.1)
    assert schedule.num_confirmed(Family.CHAIN) == 0
    assert schedule.needed_wait(Family.CHAIN, 3, 1.0) == 0


def plain_cycle():
    return replace(cycle(Shape(0), 0, 0), verify_s=PLAIN_S, total_s=PLAIN_S)


def plain_is_best(costs: CostModel) -> Prospects:
    speeds = {Shape(0): 500.0, Shape(2): 300.0, Shape(4): 250.0}
    return Prospects(speeds, Shape(0), 4, costs)


def wait_for_probe(bursts: Bursts, prospects: Prospects, costs: CostModel) -> int:
    """Return how many plain cycles pass until a probe begins."""
    for waited in range(2 * OVERDUE):
        if bursts.due(prospects) is not None:
            return waited
        bursts.observe(plain_cycle())
        costs.probes.clock += 1
    raise AssertionError("no probe ever")


def probe(bursts: Bursts, prospects: Prospects, costs: CostModel, cycle_s: float) -> int:
    """Play the probe under way, each cycle of which takes so long for two tokens; return its length."""
    for number in range(1, 20):
        shape = bursts.shape
        assert shape is not None
        costs.probes.clock += 1
        if bursts.observe(replace(cycle(shape, shape.depth, 1), total_s=cycle_s)):
            bursts.conclude(prospects)
            assert bursts.shape is None
            return number
    raise AssertionError("the probe does not end")


def test_bursts_that_lose_more_than_expected_become_rare():
    def waits(cycle_s: float) -> list[int]:
        costs = CostModel()
        bursts, prospects, found = Bursts(costs), plain_is_best(costs), []
        for _ in range(FREE_PROBES + 3):
            found.append(wait_for_probe(bursts, prospects, costs))
            probe(bursts, prospects, costs, cycle_s)
            prospects = plain_is_best(costs)
        return found

    fair, dear = waits(2 * PLAIN_S), waits(4 * PLAIN_S)
    assert dear[:FREE_PROBES] == fair[:FREE_PROBES]
    assert min(dear[FREE_PROBES:]) > max(fair[:FREE_PROBES])
    assert sum(dear) >= sum(fair)
    assert max(dear) <= OVERDUE


def test_loss_of_a_burst_is_told_by_cycle():
    costs = CostModel()
    bursts, prospects = Bursts(costs), plain_is_best(costs)
    told = []
    costs.probes.probed = lambda kind, share, before, lost: told.append((kind, lost))
    wait_for_probe(bursts, prospects, costs)
    assert probe(bursts, prospects, costs, 3 * PLAIN_S) == 3
    # Three cycles' time of plain decoding for two tokens, each.
    assert told == [(Family.CHAIN, pytest.approx(3.0 - 2.0))]


def test_burst_says_why_and_has_the_length_of_its_kind():
    costs = CostModel()
    bursts, prospects = Bursts(costs), plain_is_best(costs)
    wait_for_probe(bursts, prospects, costs)
    shape = bursts.stopping_at(0.25)
    assert (shape.depth, shape.reason, shape.stop_threshold) == (2, Reason.PROBE_CHAIN.value, 0.25)
    assert bursts.shape == shape
    assert probe(bursts, prospects, costs, PLAIN_S) == BURSTS[Family.CHAIN]


def test_burst_ends_at_once_when_the_drafter_fails():
    costs = CostModel()
    bursts, prospects = Bursts(costs), plain_is_best(costs)
    wait_for_probe(bursts, prospects, costs)
    failed = replace(cycle(bursts.shape, 0, 0), draft_failed=True)
    assert bursts.observe(failed)
    assert bursts.shape is None
    bursts.conclude(None)


def test_cycles_of_sessions_that_never_probe_pay_for_no_probe():
    costs = CostModel()
    fixed, adaptive = FixedGamma(0, costs), AdaptiveGamma(8, costs)
    for _ in range(100):
        fixed.observe(plain_cycle())
    assert costs.probes.clock == 0
    adaptive.observe(plain_cycle())
    assert costs.probes.clock == 1
