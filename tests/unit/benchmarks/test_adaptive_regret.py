"""Adaptive gamma compared with the best fixed shape."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.adaptive import regret


def speeds(**systems: list[float]) -> list[dict[str, Any]]:
    """Rows with tokens per second by repetition."""
    return [
        {"system": f"gammaray-{name.removeprefix('g')}", "tokens_per_s": {"median": 0.0, "values": values}}
        for name, values in systems.items()
    ]


def test_regret_is_over_the_fixed_shape_with_the_best_median_within_each_repetition() -> None:
    found = regret(speeds(g2=[10.0, 30.0, 10.0], g4=[20.0, 20.0, 20.0], adaptive=[19.0, 18.0, 20.0]))
    assert found["best"] == "gammaray-4"
    assert found["ratio"]["values"] == pytest.approx((0.95, 0.9, 1.0))
    assert found["ratio"]["median"] == pytest.approx(0.95)


def test_regret_held_out_takes_the_shape_that_was_best_in_the_other_repetitions() -> None:
    # Each shape wins only by one lucky repetition, which must not count for it.
    found = regret(speeds(g2=[40.0, 10.0, 10.0], g4=[10.0, 40.0, 10.0], adaptive=[10.0, 10.0, 10.0]))
    assert found["held_out"]["values"] == pytest.approx((1.0, 1.0, 1.0))
    assert max(found["ratio"]["values"]) == 1.0
    assert min(found["ratio"]["values"]) == 0.25


def test_regret_single_repetition_has_nothing_to_hold_out() -> None:
    assert regret(speeds(g2=[10.0], adaptive=[9.0]))["held_out"] is None
