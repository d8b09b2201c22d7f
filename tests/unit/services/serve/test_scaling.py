"""The number of workers of a pool, from their reports."""

from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingConfig

from gammaray.config import PoolSize, ScalingSettings
from gammaray.deploy.serve_config import autoscaling_config
from services.scheduling.load import LoadCounters, LoadReport, LoadReporter
from services.serve.autoscaling import Pool, wanted_drafters, wanted_targets

SETTINGS = ScalingSettings(target_load=8, draft_load=4)


def report(in_flight=0.0, busy=0.9, hit_rate=0.0, cache_use=0.0):
    return LoadReport(in_flight, busy, hit_rate, cache_use)


def targets(reports, wanted=None):
    return wanted_targets(Pool(wanted or len(reports), reports, 1, 8), SETTINGS)


TARGETS = {
    "idle": ([report(0)], 1),
    "full": ([report(7.9)], 1),
    "above": ([report(8.1)], 2),
    "far above": ([report(40)], 5),
    "bound": ([report(80)], 8),
    "both full": ([report(8)] * 2, 2),
    "within the band": ([report(3)] * 2, 2),
    "fits into one": ([report(2.7)] * 2, 1),
    "not busy": ([report(30, busy=0.1)], 1),
    "cache full": ([report(1, cache_use=0.9)], 2),
    "cache fits into two only": ([report(0.5, cache_use=0.45)] * 2, 2),
    "cache fits into one": ([report(0.5, cache_use=0.2)] * 2, 1),
    "no growth while one starts": ([report(40)], 2, 2),
    "less while one starts": ([report(0)], 2, 3),
}


@pytest.mark.parametrize("row", TARGETS.values(), ids=TARGETS)
def test_targets_follow_load_and_cache_with_a_dead_band(row):
    reports, expected, *wanted = row
    assert targets(reports, *wanted) == expected


DRAFTERS = {
    "grows": ([report(9)], 1.0, 3),
    "shrinks by one": ([report(0.5)] * 3, 1.0, 2),
    "none without demand": ([report(0)], 0.0, 0),
    "at least the minimum": ([report(0)], 0.0, 1, {"minimum": 1}),
    "empty without demand": ([], 0.0, 0),
    "starts when targets have load": ([], 0.2, 1),
    "the last one stays while targets have work": ([report(0)], 2.0, 1),
    "the last but one does not": ([report(0)] * 2, 2.0, 1),
    "fits into one": ([report(0.6)] * 2, 1.0, 1),
    "fits into one with prepared proposals only": ([report(0.6, hit_rate=0.8)] * 2, 1.0, 2),
    "loads its model": ([], 0.0, 1, {"wanted": 1}),
    "two load their model": ([], 3.0, 2, {"wanted": 2}),
}


@pytest.mark.parametrize("row", DRAFTERS.values(), ids=DRAFTERS)
def test_drafters_follow_their_load_and_the_demand(row):
    reports, demand, expected, *changes = row
    bounds = {"wanted": len(reports), "minimum": 0, "maximum": 8, **dict(*changes)}
    assert wanted_drafters(Pool(reports=reports, **bounds), demand, SETTINGS) == expected


def test_growth_by_load_is_stable():
    for total in range(1, 60):
        count = 1
        for _ in range(20):
            shares = [report(total / count)] * count
            count = targets(shares)
        assert targets([report(total / count)] * count) == count, total


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
