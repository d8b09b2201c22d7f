"""`benchmarks.replay`: agreement and costs from cycles, and the play of them."""

from types import SimpleNamespace

import pytest

from benchmarks.replay import CycleCosts, Text, agreement, costs_of, replay

COSTS = CycleCosts((1.0, 1.0, 1.0, 1.0, 1.4, 1.8, 2.2, 2.6, 3.0), 0.1, 0.2, 0.0, ((0.5,) * 9, (0.9,) * 9))


def cycle(drafted, accepted, *, emitted=None, propose_s=0.0, verify_s=1.0, is_hit=False):
    counts = {"drafted": drafted, "accepted": accepted, "emitted": emitted or accepted + 1}
    return SimpleNamespace(**counts, propose_s=propose_s, verify_s=verify_s, draft_ahead_hit=is_hit)


def test_agreement_is_unknown_where_nothing_was_proposed():
    cycles = [cycle(0, 0), cycle(3, 1), cycle(2, 2), cycle(8, 5, emitted=3)]
    assert agreement(cycles) == (None, True, False, True, True, None, True, True, True)


def test_costs_are_medians_and_lie_between_those_of_measured_gammas():
    misses = {gamma: [cycle(gamma, 0, propose_s=0.5 + 0.25 * gamma)] * 4 for gamma in (2, 4)}
    hits = [cycle(4, 4, propose_s=0.01, verify_s=3.0, is_hit=True)] * 9
    costs = costs_of({0: [[cycle(0, 0)] * 4], 2: [misses[2]], 4: [misses[4], hits]})
    assert costs.verify_s[:5] == pytest.approx((1.0, 1.0, 1.0, 2.0, 3.0))
    assert (costs.miss_s, costs.forward_s, costs.hit_s) == pytest.approx((0.5, 0.25, 0.01))
    assert costs.hits == ((0.0,) * 9, (1.0,) * 9)


def test_controller_comes_near_the_best_gamma_of_each_text():
    texts = [Text("easy", 0.0, (True,) * 200), Text("hard", 0.0, (False,) * 200)]
    easy, hard = replay(texts, COSTS, 3)
    assert easy["fixed"].index(max(easy["fixed"])) >= 3
    assert hard["fixed"].index(max(hard["fixed"])) == 0
    assert easy["known"]["gamma_mean"] > 2 > hard["known"]["gamma_mean"]
    for row in (easy, hard):
        assert 0.8 < row["known"]["over_best"] < 1.05
