"""The number of workers of a pool, from their reports."""

from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingConfig

from gammaray.config import PoolSize, ScalingSettings
from gammaray.deploy.serve_config import autoscaling_config
from services.scheduling.load import LoadCounters, LoadReport, LoadReporter
from services.serve.autoscaling import Pool, wanted_drafters, wanted_targets
from services.serve.policy import TargetPolicy

SETTINGS = ScalingSettings(target_load=8, draft_load=4)


def report(in_flight=0.0, busy=0.9, hit_rate=0.0, cache_use=0.0):
    return LoadReport(in_flight, busy, hit_rate, cache_use)


def pool(*reports, wanted=None, minimum=0, maximum=8):
    return Pool(len(reports) if wanted is None else wanted, reports, minimum, maximum)


def drafters(given, demand=1.0):
    return wanted_drafters(given, demand, SETTINGS)


@pytest.mark.parametrize(
    ("in_flight", "wanted"),
    [([0], 1), ([7.9], 1), ([8.1], 2), ([40], 5), ([80], 8), ([8, 8], 2), ([3, 3], 2), ([2.7, 2.7], 1)],
    ids=["idle", "full", "above", "far above", "bound", "both full", "within the band", "fits into one"],
)
def test_targets_follow_the_blocks_in_flight_with_a_dead_band(in_flight, wanted):
    assert wanted_targets(pool(*map(report, in_flight), minimum=1), SETTINGS) == wanted


def test_growth_by_load_is_stable():
    for total in range(1, 60):
        count = 1
        for _ in range(20):
            shares = [report(total / count)] * count
            count = wanted_targets(pool(*shares, minimum=1), SETTINGS)
        shares = [report(total / count)] * count
        assert wanted_targets(pool(*shares, minimum=1), SETTINGS) == count, total


def test_no_worker_is_added_if_workers_are_idle():
    assert wanted_targets(pool(report(30, busy=0.1), minimum=1), SETTINGS) == 1


def test_full_target_cache_adds_a_target_that_is_kept():
    assert wanted_targets(pool(report(1, cache_use=0.9), minimum=1), SETTINGS) == 2
    halves = [report(0.5, cache_use=0.45)] * 2
    assert wanted_targets(pool(*halves, minimum=1), SETTINGS) == 2
    assert wanted_targets(pool(*[report(0.5, cache_use=0.2)] * 2, minimum=1), SETTINGS) == 1


def test_pools_do_not_grow_but_may_shrink_while_workers_start():
    assert wanted_targets(pool(report(40), wanted=2, minimum=1), SETTINGS) == 2
    assert wanted_targets(pool(report(0), wanted=3, minimum=1), SETTINGS) == 2


def test_drafters_grow_by_load_and_shrink_one_at_a_time():
    assert drafters(pool(report(9))) == 3
    assert drafters(pool(*[report(0.5)] * 3)) == 2
    assert drafters(pool(report(0), minimum=1)) == 1
    assert drafters(pool(report(0), minimum=0), demand=0.0) == 0


def test_empty_pool_starts_when_targets_have_load():
    assert drafters(pool(), demand=0.0) == 0
    assert drafters(pool(), demand=0.2) == 1


def test_last_drafter_stays_while_targets_have_work():
    """It would be started again at once."""
    assert drafters(pool(report(0)), demand=2.0) == 1
    assert drafters(pool(*[report(0)] * 2), demand=2.0) == 1


def context(reports, wanted, bounds):
    names = ("in_flight", "busy", "hit_rate", "cache_use")
    metrics = {name: {i: getattr(r, name) for i, r in enumerate(reports)} for name in names}
    return SimpleNamespace(
        aggregated_metrics=metrics,
        running_replicas=list(range(len(reports))),
        target_num_replicas=wanted,
        capacity_adjusted_min_replicas=bounds[0],
        capacity_adjusted_max_replicas=bounds[1],
    )


def test_policies_share_the_demand_as_serve_loads_them():
    """Serve pickles a policy by value, with a copy of what its module holds."""
    bounds = PoolSize.parse("0:2")
    policies = {
        role: AutoscalingConfig(**autoscaling_config(role, bounds, SETTINGS)).policy
        for role in ("draft", "target")
    }
    loaded = {role: policy.get_policy()(**policy.policy_kwargs) for role, policy in policies.items()}
    for in_flight, wanted in ((0, 0), (3, 1), (0, 0)):
        loaded["target"](context([report(in_flight)], 1, (1, 1)))
        assert loaded["draft"](context([], 0, (0, 2)))[0] == wanted


def test_policy_waits_for_replicas_that_have_not_reported():
    target = TargetPolicy(SETTINGS.model_dump(mode="json"))
    given = context([report(40)], 2, (1, 4))
    given.running_replicas = [0, 1]
    assert target(given)[0] == 2


def test_reporter_turns_sums_into_rates(monkeypatch):
    clock = iter([10.0, 14.0, 16.0])
    # Not time.monotonic itself: threads of other tests may look at it, too.
    monkeypatch.setattr("services.scheduling.load.time", SimpleNamespace(monotonic=lambda: next(clock)))
    reporter = LoadReporter()
    first = reporter.report(LoadCounters(8.0, 2.0, 10, 4, 0.5))
    assert first == LoadReport(in_flight=2.0, busy=0.5, hit_rate=0.4, cache_use=0.5)
    second = reporter.report(LoadCounters(8.0, 2.0, 10, 4, 0.25))
    assert second == LoadReport(in_flight=0.0, busy=0.0, hit_rate=0.0, cache_use=0.25)


@pytest.mark.parametrize("value", ["", "x", "-1", "2:1", "0:65", "1:2:3", "1.5", True, None])
def test_pool_size_rejects_invalid_values(value):
    with pytest.raises(ValueError, match=r"got .*allowed: "):
        PoolSize.parse(value)


def test_prepared_proposals_count_as_load_before_removing_drafters():
    assert drafters(pool(*[report(0.6)] * 2, minimum=1)) == 1
    assert drafters(pool(*[report(0.6, hit_rate=0.8)] * 2, minimum=1)) == 2


def test_drafters_that_load_their_model_are_not_idle():
    assert drafters(pool(wanted=1), demand=0.0) == 1
    assert drafters(pool(wanted=2), demand=3.0) == 2
