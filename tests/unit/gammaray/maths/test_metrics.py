"""Counters and estimators on cycles of known distribution."""

import random

import pytest

from gammaray.maths.acceptance import AcceptanceEstimator, SpeculationCounters
from gammaray.types import DrafterKind, TokenOrigin


def cycles(alpha_by_depth, count, seed=0):
    """Yield (tested, accepted); the token at depth j passes with probability alpha_by_depth[j]."""
    rng = random.Random(seed)
    for _ in range(count):
        accepted = 0
        while accepted < len(alpha_by_depth) and rng.random() < alpha_by_depth[accepted]:
            accepted += 1
        yield min(accepted + 1, len(alpha_by_depth)), accepted


def observe(counters, gamma, accepted, **fields):
    """Count a cycle with `gamma` draft tokens of which `accepted` pass."""
    given = {"tested": min(gamma, accepted + 1), "emitted": accepted + 1, "draft_s": 0.5, "verify_s": 2.0}
    counters.observe(gamma=gamma, accepted=accepted, **{**given, **fields})


def test_counters_small_example_by_hand():
    counters = SpeculationCounters()
    for gamma, accepted, emitted in [(4, 4, 5), (4, 2, 3), (0, 0, 1), (2, 0, 1), (4, 4, 2)]:
        observe(counters, gamma, accepted, emitted=emitted)
    assert (counters.cycles, counters.drafted, counters.tested) == (5, 14, 12)
    summary = counters.summary(total_s=20.0)
    assert (summary.alpha, summary.acceptance_rate, summary.gamma_mean) == (10 / 12, 10 / 14, 14 / 5)
    assert summary.accepted_lengths == (2, 0, 1, 0, 2)
    assert summary.tokens_per_cycle == 12 / 5
    assert (summary.draft_ms, summary.verify_ms, summary.other_ms) == (2500.0, 10_000.0, 7500.0)
    assert summary.total_ms == 20_000.0
    assert summary.speedup_estimate is None, "the time of a plain cycle is not known"


def test_counters_tell_the_tokens_of_the_prediction_from_those_of_other_drafters():
    counters = SpeculationCounters()
    counters.catch_up([TokenOrigin.ACCEPTED, TokenOrigin.BONUS])  # whose tokens these were is unknown
    for drafter, gamma, accepted in (
        (DrafterKind.PREDICTION, 5, 5),
        (DrafterKind.MODEL, 4, 3),
        (DrafterKind.PREDICTION, 6, 2),
        (DrafterKind.SUFFIX, 7, 1),
        (DrafterKind.PREDICTION, 0, 0),
    ):
        observe(counters, gamma, accepted, drafter=drafter)
    assert (counters.prediction_drafted, counters.prediction_accepted) == (11, 7)
    summary = counters.summary(1.0)
    assert (summary.drafted_tokens, summary.accepted_tokens) == (23, 12)
    cycles = (summary.prediction_cycles, summary.suffix_cycles, summary.model_cycles, summary.plain_cycles)
    assert cycles == (2, 1, 1, 1)


def test_counters_speedup_skips_the_first_cycle_and_uses_current_plain_costs():
    counters = SpeculationCounters()
    # (tokens, seconds, seconds of a plain cycle then): a prefill, then a quiet and a busy moment.
    for emitted, cycle_s, plain_cycle_s in [(1, 100.0, 1.0), (3, 1.5, 1.0), (3, 15.0, 10.0), (2, 9.0, None)]:
        observe(counters, 2, emitted - 1, cycle_s=cycle_s, plain_cycle_s=plain_cycle_s)
    assert counters.summary(130.0).speedup_estimate == 2.0


def test_estimator_uses_shared_statistics_before_its_own_samples():
    fleet = AcceptanceEstimator(decay=1.0)
    for tested, accepted in cycles([0.9, 0.5, 0.5], 3000):
        fleet.observe(tested, accepted)
    estimator = AcceptanceEstimator(fleet=fleet)
    assert estimator.alpha == pytest.approx(fleet.alpha)
    assert estimator.by_depth(3) == pytest.approx(fleet.by_depth(3))
    for _ in range(100):
        estimator.observe(1, 0)
    assert estimator.by_depth(1)[0] < 0.25
    estimator.fade(0.0)
    assert estimator.by_depth(3) == pytest.approx(fleet.by_depth(3))


def test_estimator_alpha_that_falls_with_depth_is_followed():
    falling = [0.9, 0.7, 0.5, 0.3]
    estimator = AcceptanceEstimator(decay=1.0)
    for tested, accepted in cycles(falling, 6000):
        estimator.observe(tested, accepted)
    assert estimator.by_depth(4) == pytest.approx(falling, abs=0.03)
    assert estimator.alpha > falling[-1] + 0.2  # one alpha for all depths would be far off
