"""Gaps between tokens: bursts, percentiles, and the closed forms against simulated cycles."""

from __future__ import annotations

import random
import statistics

import pytest

from gammaray.bench.rows import (
    burst_cv2,
    burst_zero_share,
    gap_figures,
    gaps,
    paced_gaps,
    percentile,
)
from gammaray.bench.systems import Arrival
from gammaray.maths.theory import expected_tokens


def cycles(num_cycles: int, alpha: float, gamma: int, seconds: float = 0.02, seed: int = 7) -> list[Arrival]:
    """Chunks of cycles of equal length whose draft tokens pass independently with probability alpha."""
    rng = random.Random(seed)
    made = []
    for i in range(num_cycles):
        accepted = 0
        while accepted < gamma and rng.random() < alpha:
            accepted += 1
        made.append(((i + 1) * seconds, accepted + 1))
    return made


def test_gaps_within_a_chunk_are_zero_and_the_first_chunk_counts_as_first_token() -> None:
    assert gaps([(0.5, 3), (0.75, 1), (1.0, 3)]) == pytest.approx([0.25, 0.25, 0.0, 0.0])
    assert gaps([(0.5, 3)]) == []
    assert gaps([]) == []


def test_gap_figures_of_iid_cycles_match_the_closed_forms() -> None:
    # Published for alpha .8, gamma 5: 2.689.
    figures = gap_figures([cycles(20_000, alpha=0.8, gamma=5)])
    assert figures is not None
    tokens = expected_tokens(0.8, 5)
    assert burst_cv2(tokens) == pytest.approx(2.689, abs=5e-4)
    assert figures["tokens_per_cycle"] == pytest.approx(tokens, rel=0.02)
    assert figures["cv2"] == pytest.approx(burst_cv2(tokens), rel=0.03)
    assert figures["zero_share"] == pytest.approx(burst_zero_share(tokens), rel=0.01)
    assert figures["mean_ms"] == pytest.approx(20.0 / tokens, rel=0.02)
    assert figures["p50_ms"] == 0.0
    assert figures["p99_ms"] == pytest.approx(20.0)


def test_gap_figures_expected_values_hold_exactly_for_cycles_of_equal_length() -> None:
    figures = gap_figures([cycles(300, alpha=0.6, gamma=3)])
    assert figures is not None
    assert figures["cv2"] == pytest.approx(figures["expected"]["cv2"])
    assert figures["zero_share"] == pytest.approx(figures["expected"]["zero_share"])


def test_gap_figures_plain_decoding_at_a_steady_pace_has_no_bursts() -> None:
    figures = gap_figures([[(0.1 * (i + 1), 1) for i in range(20)]])
    assert figures is not None
    assert figures["cv2"] == pytest.approx(0.0, abs=1e-9)
    assert figures["zero_share"] == 0.0


def test_gap_figures_nothing_between_tokens_is_none() -> None:
    assert gap_figures([]) is None
    assert gap_figures([[(0.5, 4)], []]) is None


def test_paced_gaps_are_even_once_the_pace_is_known_and_lose_no_time() -> None:
    arrivals = cycles(400, alpha=0.8, gamma=5)
    raw, paced = gaps(arrivals), paced_gaps(arrivals)
    assert len(paced) == len(raw) - 1
    # A rare long lull after short cycles cannot be foreseen, but most gaps become one pace.
    assert percentile(paced, 50) == pytest.approx(statistics.fmean(raw), rel=0.25)
    assert statistics.pvariance(paced) < 0.5 * statistics.pvariance(raw)
    assert all(gap >= 0.0 for gap in paced)


@pytest.mark.parametrize(
    ("values", "q", "wanted"),
    [([3.0], 99, 3.0), ([1.0, 2.0], 50, 1.5), ([2.0, 0.0, 1.0], 0, 0.0), ([0.0, 1.0, 2.0], 100, 2.0),
     (list(range(101)), 95, 95.0)],
)  # fmt: skip
def test_percentile_is_linear_between_neighbours(values: list[float], q: float, wanted: float) -> None:
    assert percentile(values, q) == pytest.approx(wanted)
