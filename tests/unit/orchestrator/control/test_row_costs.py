"""What rows add to a forward, from the times of a target worker."""

import pytest

from gammaray.types import MAX_NODES
from orchestrator.control.row_costs import ASSUMED, RowCosts

KNEE = [100.0, 100.0, 100.0, 220.0, 460.0]
"""Forwards whose rows cost nothing up to the fourth and 30 each from the fifth on."""


def added_s(costs: RowCosts, others: float, rows: int) -> float:
    return costs.mean * costs.added(others)[rows] * KNEE[0]


@pytest.mark.parametrize(
    ("others", "rows", "seconds"),
    [(0, 0, 0), (0, 3, 0), (0, 4, 30), (0, 15, 360), (0, 40, 1110), (2, 1, 0), (2.9, 3, 60), (300, 2, 60)],
)
def test_rows_cost_what_the_timed_forwards_say(others, rows, seconds):
    assert added_s(RowCosts(KNEE), others, rows) == pytest.approx(seconds)


@pytest.mark.parametrize("forward_s", [(), (5.0,), (0.0, 0.0), (4.0, 4.0, 4.1, 4.2, 4.1)])
def test_rows_cost_the_same_where_times_say_nothing_of_them(forward_s):
    costs = RowCosts(forward_s)
    assert costs.added(3.0) == pytest.approx(range(MAX_NODES + 1))
    assert costs.mean == pytest.approx(0.05 / 15 if len(forward_s) > 2 else ASSUMED)


def test_forwards_that_took_less_than_smaller_ones_are_noise():
    costs = RowCosts([120.0, 100.0, 90.0, 220.0, 460.0])
    assert costs.added(0)[:4] == (0.0, 0.0, 0.0, 0.0)
    assert min(costs.added(0)) == 0.0
