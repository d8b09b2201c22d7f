"""The comparison of two source trees: what is divided by what, and which trees are refused."""

from __future__ import annotations

import math

import pytest

from benchmarks.commits import Turn, compare, interval


def turns(*speeds, overhead=()):
    return [Turn(tokens=speed, seconds=1.0, overhead_ms=list(overhead)) for speed in speeds]


def test_ratios_are_after_over_before_pair_by_pair():
    row = compare((0.0, 8), {"before": turns(100, 200, 400), "after": turns(150, 100, 400)})
    assert row["speed_ratios"] == [1.5, 0.5, 1.0]
    assert row["tokens_per_s"] == {"before": 200, "after": 150}
    assert "overhead_ratios" not in row, "no cycle was traced"


def test_overhead_is_the_median_of_a_turn():
    before, after = turns(1, 1, overhead=(2.0, 4.0, 90.0)), turns(1, 1, overhead=(3.0, 3.0, 3.0))
    row = compare((1.0, 4), {"before": before, "after": after})
    assert row["overhead_ms"] == {"before": 4.0, "after": 3.0}
    assert row["overhead_ratios"] == [0.75, 0.75]


def test_interval_of_two_ratios_is_students():
    mean, low, high = interval([1.0, math.e**2])
    assert mean == pytest.approx(math.e)
    assert math.log(high / mean) == pytest.approx(math.tan(math.pi * 0.475)), "one degree of freedom: Cauchy"
    assert low * high == pytest.approx(mean**2)


def test_equal_ratios_have_no_width():
    assert interval([0.9] * 3) == pytest.approx((0.9, 0.9, 0.9))
